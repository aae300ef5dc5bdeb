"""What a family module states about its model type."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import torch
import transformers

from goldens.disk import Disk
from goldens.oracle import Block
from goldens.recording import Recorded, record_block


@dataclasses.dataclass(frozen=True)
class Facts:
    """One row of docs/models.md; plain Markdown without pipes."""

    fields: str
    layer_rule: str
    router: str
    names: str
    quirks: str = ""


@dataclasses.dataclass(frozen=True)
class Family:
    """One golden checkpoint. Paths contain {} for the layer number."""

    name: str  # the folder's name, the model type or the model type with a variant
    config: Callable[[], transformers.PretrainedConfig]
    layers: list[int]  # which layers must hold an MoE block, all others must not
    module: str  # path of the block in the module tree
    disk: str  # prefix of the block's tensors on disk
    read: Callable[[Disk, str], Block]  # from the tensors below the prefix
    facts: Facts
    seed: int
    block: str = "routed experts and shared experts"  # what the golden's output includes
    auto_class: str = "AutoModelForCausalLM"
    model_class: str | None = None  # instead of auto_class
    dtype: torch.dtype = torch.bfloat16
    keep_float32: str = r"(e_score_correction_bias|expert_bias)$"  # names stored as f32 all the same
    fill: dict[str, Callable] = dataclasses.field(default_factory=dict)  # name regex -> values(standard normal)
    record: Callable[..., Recorded] = record_block  # (model, path, hidden_states, extra) -> Recorded
    router_path: str = "gate"  # below the block, for record_block
    experts_path: str = "experts"  # below the block; a layer without it is dense
    rewrite: Callable[[dict], dict] | None = None  # saved tensors -> the release's layout, where saving differs
    extra: Callable | None = None  # (hidden_states, stream) -> side inputs by name, f32 or i32
    tokens: int = 12
    spread: float = 1.0  # standard deviation of the hidden states
    noise: float = 1.0  # multiple of the logit noise that routing must survive in the bf16 run
    unread: tuple[str, ...] = ()  # tensors below the prefix that are not the block's

    made_by: ClassVar[str] = "transformers"  # what computed the float32 and bfloat16 runs

    @property
    def model_type(self) -> str:
        return self.name.partition("-")[0]

    def loader(self):
        return getattr(transformers, self.model_class or self.auto_class)

    def build(self) -> torch.nn.Module:
        config = self.config()
        if self.model_class:
            return self.loader()(config).to(torch.float32)
        return self.loader().from_config(config, dtype=torch.float32)
