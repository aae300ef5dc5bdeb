"""What ranks of test_vllm_groups.py do: `FusedMoE` over an engine's groups."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import conclave
from conclave import vllm
from conclave.vllm.engine.context import set_forward_context
from support.devices import seeded

SIZES = {"num_experts": 8, "top_k": 2, "hidden_size": 48, "intermediate_size": 48}
TOKENS = (5, 0, 9, 1)


@dataclasses.dataclass(frozen=True)
class Split:
    """Sizes of an engine's groups. Its rank is (dp_rank, pcp_rank, tp_rank) as one number."""

    tp: int = 1
    pcp: int = 1
    dp: int = 1
    experts: bool = False
    sequence: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.pcp * self.dp

    def place(self, rank: int) -> dict[str, int]:
        return {
            "tp": rank % self.tp,
            "pcp": rank // self.tp % self.pcp,
            "dp": rank // self.tp // self.pcp,
        }

    def tokens_of(self, rank: int) -> int:
        """Whose tokens a rank has: those of its tensor group, unless each has its own."""
        return rank if self.sequence else rank // self.tp

    def config(self, rank: int) -> vllm.FusedMoEParallelConfig:
        place = self.place(rank)
        return vllm.FusedMoEParallelConfig.make(
            self.tp,
            self.dp,
            pcp_size_=self.pcp,
            sp_size_=self.tp if self.sequence else 1,
            tp_rank=place["tp"],
            dp_rank=place["dp"],
            pcp_rank=place["pcp"],
            enable_expert_parallel=self.experts,
        )


SPLITS = {
    2: [
        Split(tp=2),
        Split(tp=2, experts=True),
        Split(dp=2),
        Split(dp=2, experts=True),
        Split(pcp=2, experts=True),
        Split(tp=2, experts=True, sequence=True),
    ],
    4: [
        Split(tp=4),
        Split(dp=4, experts=True),
        Split(tp=2, dp=2),
        Split(tp=2, dp=2, experts=True),
        Split(pcp=2, dp=2, experts=True),
        Split(tp=2, pcp=2, experts=True),
        Split(tp=2, dp=2, experts=True, sequence=True),
    ],
}


class Coordinator:
    """What vLLM's get_tp_group() and its like return."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.cpu_group, self.device_group = group, None
        self.world_size, self.rank_in_group = group.size(), group.rank()


class SharedPart(torch.nn.Module):
    """A tensor rank's part of shared experts: the parts of all add up to a product."""

    def __init__(self, part: int, parts: int) -> None:
        super().__init__()
        weight = torch.randn(48, 48, generator=seeded(12))
        share = torch.full((parts, 1), 1.0 / parts) if parts > 1 else torch.ones(1, 1)
        self.register_buffer("part", weight * share[part], False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.part.to(hidden.dtype).T


def layer_of(split: Split | None, rank: int = 0, **arguments: Any) -> vllm.FusedMoE:
    """A rank's layer with its part of the weights; None: the whole."""
    if split is not None:
        arguments.setdefault("is_sequence_parallel", split.sequence)
    layer = vllm.FusedMoE(**{**SIZES, **arguments})
    generator = seeded(11)
    for expert in range(8):
        for shard, name, shape in (
            ("w1", "w13_weight", (48, 48)),
            ("w3", "w13_weight", (48, 48)),
            ("w2", "w2_weight", (48, 48)),
        ):
            whole = torch.randn(shape, generator=generator) / 4
            layer.weight_loader(getattr(layer, name), whole, name, shard, expert)
    return layer


def given(number: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of one owner, and their logits."""
    count = TOKENS[number]
    hidden = torch.randn(count, 48, generator=seeded(20 + number)).to(dtype)
    return hidden, torch.randn(count, 8, generator=seeded(40 + number))


def groups_of(split: Split, rank: int) -> dict[str, dist.ProcessGroup]:
    """This rank's groups by axis; every rank makes those of all."""
    mine = {}
    axes = {"tp": split.tp, "pcp": split.pcp, "dp": split.dp}
    for axis in axes:
        others = [name for name in axes if name != axis]
        for place in itertools.product(*(range(axes[name]) for name in others)):
            fixed = dict(zip(others, place, strict=True))
            members = [
                member
                for member in range(split.ranks)
                if all(split.place(member)[name] == at for name, at in fixed.items())
            ]
            made = dist.new_group(members)
            if rank in members:
                mine[f"{axis}_group"] = made
    if split.experts:
        mine["ep_group"] = dist.new_group(list(range(split.ranks)))
    return mine


def shared_part(split: Split, rank: int) -> SharedPart:
    return SharedPart(0, 1) if split.sequence else SharedPart(split.place(rank)["tp"], split.tp)


def variants(split: Split, rank: int) -> dict[str, dict[str, Any]]:
    """Arguments of a layer, by what they try."""
    bias = torch.zeros(11)
    bias[8:] = 0.2
    return {
        "plain": {},
        "shared": {"shared_experts": shared_part(split, rank)},
        "apart": {"shared_experts": shared_part(split, rank), "return_shared_apart": True},
        "transform": {
            "shared_experts": shared_part(split, rank),
            "routed_output_transform": torch.nn.Tanh(),
            "routed_scaling_factor": 2.5,
            "apply_routed_scale_to_output": True,
        },
        "zero experts": {
            "zero_expert_type": "identity",
            "e_score_correction_bias": bias,
            "renormalize": False,
        },
    }


def logits_for(name: str, logits: torch.Tensor) -> torch.Tensor:
    return torch.cat([logits, logits[:, :3].flip(1)], 1) if name == "zero experts" else logits


def every_split(rank, folder, ranks):
    """Results by split and variant, and what forward returns where the caller adds up."""
    found = {}
    for number, split in enumerate(SPLITS[ranks]):
        groups = groups_of(split, rank)
        if number % 2 == 1:
            groups = {name: Coordinator(group) for name, group in groups.items()}
        hidden, logits = given(split.tokens_of(rank))
        for name, more in variants(split, rank).items():
            layer = layer_of(split, rank, reduce_results=True, **groups, **more)
            assert layer.moe_parallel_config == split.config(rank)
            found[number, name] = layer(hidden, logits_for(name, logits))
        partial = layer_of(split, rank, **groups)
        found[number, "partial"] = partial(hidden, logits)
        halves = layer_of(split, rank, reduce_results=True, params_dtype=torch.bfloat16, **groups)
        found[number, "bfloat16"] = halves(hidden.bfloat16(), logits)
    return found


def only_experts(rank, folder):
    """ep_group alone: of ranks that have the same tokens, and of dp ranks by a configuration."""
    hidden, logits = given(2)
    alone = layer_of(None, ep_group=dist.group.WORLD, reduce_results=True)(hidden, logits)
    split = Split(dp=2, experts=True)
    config = split.config(rank)
    moved = layer_of(
        split, ep_group=dist.group.WORLD, moe_parallel_config=config, reduce_results=True
    )
    return alone, moved(*given(split.tokens_of(rank)))


def refusals(rank, folder):
    world = dist.group.WORLD
    config = vllm.FusedMoEParallelConfig
    naive = Split(dp=2, experts=True).config(rank)
    calls = {
        "size": lambda: layer_of(None, tp_group=world, tp_size=3),
        "kind": lambda: layer_of(None, tp_group="world"),
        "rank": lambda: layer_of(
            None, tp_group=world, moe_parallel_config=config(tp_size=2, tp_rank=1 - rank)
        ),
        "missing dp": lambda: layer_of(
            None,
            tp_group=world,
            moe_parallel_config=config(tp_size=4, tp_rank=rank, dp_size=2),
        ),
        "backend": lambda: layer_of(
            None,
            dp_group=world,
            ep_group=world,
            moe_parallel_config=dataclasses.replace(naive, all2all_backend="deepep_low_latency"),
        ),
        "without experts": lambda: layer_of(
            None, ep_group=world, moe_parallel_config=config(tp_size=2, tp_rank=rank)
        ),
        "sequence": lambda: layer_of(None, tp_group=world, is_sequence_parallel=True),
        "no sequence": lambda: layer_of(
            None,
            ep_group=world,
            moe_parallel_config=config(ep_size=2, ep_rank=rank, use_ep=True, sp_size=2),
        ),
        "new split": lambda: layer_of(None, ep_group=world).update_expert_map(
            config(ep_size=3, ep_rank=rank, use_ep=True)
        ),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "accepted"
        except conclave.Error as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def disagree(rank, folder, what):
    """Both ranks of dp or tp bring what does not go together."""
    axis = "tp_group" if what == "tokens" else "dp_group"
    group = conclave.from_process_group(timeout=10)
    layer = layer_of(None, **{axis: group}, reduce_results=True)
    hidden, logits = given(2)
    if rank == 1 and what == "tokens":
        hidden, logits = hidden[:4], logits[:4]
    if rank == 1 and what == "type":
        hidden = hidden.half()
    layer(hidden, logits)


def lost(rank, folder):
    group = conclave.from_process_group(timeout=10)
    layer = layer_of(None, dp_group=group, reduce_results=True)
    layer(*given(rank))
    if rank == 1:
        raise RuntimeError("this rank has another problem")
    layer(*given(rank))


def told_tokens(rank, folder):
    """Results by split with the numbers of tokens given, in each form, beside those of ranks that
    ask. Splits of dp and pcp ranks, and of ranks that have shares of a sequence."""
    found = {}
    for number, split in enumerate(SPLITS[4]):
        layer = layer_of(split, rank, reduce_results=True, **groups_of(split, rank))
        owners = split.ranks if split.sequence else split.dp * split.pcp
        tokens = list(TOKENS[:owners])
        hidden, logits = given(split.tokens_of(rank))
        asked = layer(hidden, logits)
        found[number, "list"] = torch.equal(layer(hidden, logits, rank_tokens=tokens), asked)
        told = layer(hidden, logits, rank_tokens=torch.tensor(tokens, dtype=torch.int32))
        found[number, "tensor"] = torch.equal(told, asked)
        across = torch.tensor(tokens, dtype=torch.int32) if split.pcp == 1 else None
        context = set_forward_context(None, _Engine(), num_tokens_across_dp=across)
        with context if not split.sequence else contextlib.nullcontext():
            found[number, "context"] = torch.equal(layer(hidden, logits), asked)
    return found


class _Engine:
    """As much of an engine's configuration as `set_forward_context` reads."""

    class compilation_config:
        static_forward_context: ClassVar[dict[str, Any]] = {}
        static_all_moe_layers: ClassVar[list[str]] = []


def refused_tokens(rank, folder):
    """What each wrong list ends with, before anything is sent."""
    layer = layer_of(None, dp_group=dist.group.WORLD, reduce_results=True)
    alone = layer_of(None, moe_parallel_config=Split(dp=2).config(rank))
    one = layer_of(None)
    hidden, logits = given(rank)
    own = len(hidden)
    calls = {
        "short": lambda: layer(hidden, logits, rank_tokens=[5]),
        "negative": lambda: layer(hidden, logits, rank_tokens=[5, -1]),
        "other": lambda: layer(hidden, logits, rank_tokens=[6, 1]),
        "number": lambda: layer(hidden, logits, rank_tokens=5),
        "real": lambda: layer(hidden, logits, rank_tokens=torch.tensor([5.0, 0.0])),
        "no groups": lambda: alone(hidden, logits, rank_tokens=[5, 0]),
        "one rank": lambda: one(hidden, logits, rank_tokens=[own + 1]),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "accepted"
        except conclave.Error as error:
            found[name] = f"{type(error).__name__}: {error}"
    layer(hidden, logits, rank_tokens=[5, 0])
    one(hidden, logits, rank_tokens=[own])
    return found


def disagree_on_tokens(rank, folder, what):
    """Ranks that were given other lists, one that asks, and rows of other types of one size."""
    group = conclave.from_process_group(timeout=10)
    layer = layer_of(None, dp_group=group, reduce_results=True)
    hidden, logits = given(rank)
    tokens = [5, 0]
    if what == "lists" and rank == 1:
        tokens = [4, 0]
    if what == "one asks" and rank == 1:
        tokens = None
    if what == "types":
        hidden = hidden.half() if rank == 0 else hidden.bfloat16()
    layer(hidden, logits, rank_tokens=tokens)
