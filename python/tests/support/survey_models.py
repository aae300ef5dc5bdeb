"""Every model class of the installed transformers that has experts, as a tiny random model."""

from __future__ import annotations

import copy
import importlib
import inspect
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from conclave.transformers._find import find_candidates
from support import models

_MODELS = pathlib.Path(transformers.__file__).parent / "models"
# A class whose name says that it holds experts; a word of it is not enough (Cohere2Moe's norms).
_EXPERTS = re.compile(r"^class \w*(?:Experts?|MoE|Moe|MoEBlock|MoeBlock|SparseMLP|MoeMLP)\(", re.M)

# Families without a folder of testdata: what makes their default configuration tiny.
_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_heads": 4, "num_experts": 4}
_NLLB = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in
         (("layers", 2), ("ffn_dim", 40), ("attention_heads", 4))}  # fmt: skip
_FIELDS: dict[str, dict[str, Any]] = {
    "SwitchTransformersConfig": _T5
    | {"num_layers": 2, "num_decoder_layers": 2}
    | {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "NllbMoeConfig": {"vocab_size": 96, "d_model": 32, "num_experts": 4}
    | {"encoder_sparse_step": 2, "decoder_sparse_step": 2}
    | _NLLB,
    "DogeConfig": _COMMON | {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 4},
    "VitPoseBackboneConfig": {"image_size": [32, 32], "patch_size": [8, 8], "hidden_size": 32}
    | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_experts": 3, "part_features": 8},
    "ZayaConfig": _COMMON | {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "LaraMiniConfig": _COMMON
    | {"shared_expert_intermediate_size": 24, "linear_num_key_heads": 2}
    | {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "MuseSparkTextConfig": _COMMON | {"num_local_experts": 8, "moe_hidden_size": 16},
    "MuseSparkVisionConfig": {"hidden_size": 16, "intermediate_size": 16}
    | {"num_hidden_layers": 1, "num_attention_heads": 2},
    "MuseSparkAudioConfig": {"hidden_sizes": [4, 8], "depths": [1, 1], "patch_sizes": [4, 4]}
    | {"num_hidden_layers": 2, "out_hidden_size": 32},
    "MuseSparkConfig": {"out_hidden_size": 32, "projector_hidden_size": 16},
    "Inkling2LoopTextConfig": _COMMON
    | {"num_hidden_layers": 3, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2}
    | {"swa_head_dim": 8, "sliding_window_size": 8, "d_rel": 4, "rel_extent": 8}
    | {"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 2}
    | {"unpadded_vocab_size": 96, "n_routed_experts": 8, "loop_gate_rank": 4},
    "HYV4VLTextConfig": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [0, 1, 1]}
    },
    "Qwen3OmniMoeTalkerTextConfig": _COMMON | {"shared_expert_intermediate_size": 16},
    "HYV4VLVisionConfig": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    | {"num_attention_heads": 2, "patch_size": 2, "max_image_size": 16},
    "Dots3NoteVisionConfig": {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    | {"num_hidden_layers": 2, "moe_intermediate_size": 12, "mlp_layer_types": ["dense", "sparse"]}
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "patch_size": 2, "adapter_in_dim": 16},
    "Dots3NoteAudioConfig": {"hidden_size": 16, "intermediate_size": 16, "adapter_input_size": 16}
    | {"num_hidden_layers": 1, "num_attention_heads": 2, "feature_size": 16}
    | {"downsample_hidden_size": 8},
}
# Configurations with the fields of another family's.
_LIKE = {"HYV4VLTextConfig": "HYV4Config", "Inkling2LoopVisionConfig": "Inkling2VisionConfig"}
# Fields of parts that are the width of the text model.
_WIDTHS = ("text_hidden_size", "out_hidden_size", "adapter_out_dim")
_MOST = 4_000_000  # parameters of a tiny model


def families() -> list[str]:
    """Folders of transformers/models whose code has experts, and those that testdata names."""
    found = set()
    for path in _MODELS.glob("*/modeling_*.py"):
        if _EXPERTS.search(path.read_text()):
            found.add(path.parent.name)
    return sorted(found | _wrapping_families())


def _wrapping_families() -> set[str]:
    """Families with a folder here, whose experts may be another family's code."""
    found = set()
    for name in models.folders():
        try:
            cls, _ = models.config_of(name)
        except models.NoClass:
            continue
        found.add(cls.__module__.split(".")[-2])
    return found


def classes_of(family: str) -> Iterator[type]:
    """The classes of a family that can be models, heads and trunks alike."""
    for path in sorted((_MODELS / family).glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{family}.{path.stem}")
        for name, cls in vars(module).items():
            if not (inspect.isclass(cls) and issubclass(cls, transformers.PreTrainedModel)):
                continue
            if cls.__module__ == module.__name__ and "PreTrained" not in name:
                yield cls


_configs: dict[type, list[Any]] = {}


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, transformers.PretrainedConfig):
            yield from _parts(value)


def _known_configs() -> dict[type, list[Any]]:
    """The configurations of testdata and those inside them, by class."""
    if not _configs:
        for name in models.folders():
            try:
                _, config = models.config_of(name)
            except models.NoClass:
                continue
            models._TWEAKS.get(name, lambda config: None)(config)
            for part in _parts(config):
                _configs.setdefault(type(part), []).append(part)
    return _configs


class NotTried(Exception):
    """A class that no tiny model could be made of, or run; the text says why."""


def config_for(cls: Any) -> Any:
    """A configuration of a class. Raises NotTried."""
    if cls.config_class is None:
        raise NotTried("it names no configuration")
    try:
        return _tiny(cls.config_class)
    except Exception as error:
        raise NotTried(f"no tiny configuration: {line_of(error)}") from error


def _tiny(kind: Any, width: int | None = None) -> Any:
    """A configuration of a kind, of testdata if it has one."""
    known = _known_configs()
    if kind in known:
        fields = known[kind][0].to_dict() | _FIELDS.get(kind.__name__, {})
        return kind.from_dict(fields | _widths(kind, width))
    like = next((k for k in known if k.__name__ == _LIKE.get(kind.__name__)), None)
    if like is not None:
        fields = known[like][0].to_dict() | _FIELDS.get(kind.__name__, {})
        fields.pop("model_type")
    else:
        parts = _tiny_parts(kind)
        fields = _FIELDS.get(kind.__name__, {} if parts else _COMMON) | parts
    return kind(**fields | _widths(kind, width))


def _widths(kind: Any, width: int | None) -> dict[str, int]:
    return {n: width for n in _WIDTHS if width is not None and hasattr(kind, n)}


def _tiny_parts(kind: Any) -> dict[str, Any]:
    """The parts of a configuration, the text's first, whose width the others take."""
    text = getattr(kind, "sub_configs", {}).get("text_config")
    if text is None:
        return {}
    found = {"text_config": _tiny(text)}
    for name in kind.sub_configs:
        if name != "text_config":
            part = _part_class(kind, name)
            found[name] = _tiny(part, found["text_config"].hidden_size)
    return {name: part.to_dict() for name, part in found.items()}


def _part_class(kind: Any, name: str) -> Any:
    part = kind.sub_configs[name]
    if part is not transformers.AutoConfig:
        return part
    default = kind.sub_configs_defaults[name].model_type
    return transformers.CONFIG_MAPPING[default]


def line_of(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}"


class NoExperts(Exception):
    """A class without experts, such as a vision tower."""


def _require_experts(cls: Any, config: Any) -> None:
    """Raises NoExperts, and ValueError for a model that is not tiny."""
    with torch.device("meta"):
        model = cls(copy.deepcopy(config))
    if not any(True for _ in find_candidates(model)):
        raise NoExperts
    count = sum(weights.numel() for weights in model.parameters())
    if count > _MOST:
        raise ValueError(f"{count} parameters")


def build(cls: Any) -> Any:
    """A model of random weights, large enough that routing and experts tell. Raises NotTried and
    NoExperts."""
    config = config_for(cls)
    for part in _parts(config):
        part._attn_implementation = "eager"
        part._experts_implementation = "eager"
        if getattr(part, "pad_token_id", None) is None:
            part.pad_token_id = 0  # heads that classify look for it; no prompt here has it
    try:
        _require_experts(cls, config)
        torch.manual_seed(7)
        model = cls._from_config(config) if hasattr(cls, "_from_config") else cls(config)
    except NoExperts:
        raise
    except Exception as error:
        raise NotTried(f"it cannot be built: {line_of(error)}") from error
    numbers = torch.Generator("cpu").manual_seed(17)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() >= 2 and weights.is_floating_point():
                values = torch.randn(weights.shape, generator=numbers, device="cpu")
                weights.copy_(values * 0.15)
            elif "bias" in name:
                weights.copy_(torch.randn(weights.shape, generator=numbers, device="cpu") * 0.1)
    return model.float().eval()
