"""Layers of vLLM's names whose experts move, and what ranks of test_vllm_eplb.py do with them."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

import conclave
from conclave import vllm
from conclave.vllm._modules import members_of
from support.method_layers import config_of, layer_of, load, logits_for, sizes_of

LAYERS = 2


def config(**fields: Any) -> vllm.EPLBConfig:
    return vllm.EPLBConfig(**{"window_size": 3, "step_interval": 1000} | fields)


def redundant_of(name: str) -> int:
    """Two, or three where slots divide by two ranks then."""
    return 2 + sizes_of(config_of(name)[0])["num_experts"] % 2


class Model(torch.nn.Module):
    """Layers of one checkpoint, with the names that vLLM's models have."""

    def __init__(
        self,
        name: str,
        size: int = 1,
        rank: int = 0,
        group: Any = None,
        redundant: int | None = None,
    ) -> None:
        super().__init__()
        split = {} if size == 1 else {"ep_size": size, "ep_rank": rank, "use_ep": True}
        self.moe_layers = torch.nn.ModuleList()
        redundant = redundant_of(name) if redundant is None else redundant
        for _ in range(LAYERS):
            layer, self.hidden, self.expected = layer_of(
                name,
                enable_eplb=True,
                num_redundant_experts=redundant,
                moe_parallel_config=vllm.FusedMoEParallelConfig(**split),
                ep_group=group,
                reduce_results=group is not None,
            )
            count = layer.logical_num_experts
            layer.expert_mapping = vllm.FusedMoE.make_expert_params_mapping(
                None, *members_of(layer.expert_mapping), count, redundant
            )
            load(layer, name)
            self.moe_layers.append(layer)

    def forward(self) -> list[torch.Tensor]:
        return [layer(self.hidden, logits_for(layer, self.hidden)) for layer in self.moe_layers]


def skewed(model: Model) -> torch.Tensor:
    """Rows [layers, logical] of which the last experts have the most."""
    count = model.moe_layers[0].logical_num_experts
    return torch.stack([(torch.arange(count) + 1 + layer) ** 2 for layer in range(LAYERS)])


def slots_of_rank(layer: Any, of_all: list[int]) -> list[int]:
    width = layer.local_num_experts
    return of_all[layer.ep_rank * width : (layer.ep_rank + 1) * width]


def rows_of(layer: Any) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in layer.get_expert_weights()]


def moved(rank: int, folder: Any, names: list[str], isa: str | None) -> list[Any]:
    """Results of layers over the group, before and after their experts have moved."""
    if isa is not None:  # processes have the environment of the first test that made some
        os.environ["CONCLAVE_ISA"] = isa
    found = []
    for name in names:
        model = Model(name, 2, rank, dist.group.WORLD)
        state = vllm.EplbState(config())
        of_model = state.add_model(model)
        before = model()
        state.step(log_stats=True)
        old = of_model.physical_to_logical_map.tolist()
        state.rearrange()
        by_load = of_model.physical_to_logical_map.tolist()
        state.rearrange()  # by the same window: nothing is left to do
        again = of_model.physical_to_logical_map.tolist()
        after = model()
        found.append((before, after, model.expected, old, by_load, again, of_model.experts_moved))
    return found


def moved_beside_forwards(rank: int, folder: Any, name: str, isa: str | None) -> Any:
    """Results before each step of a move whose experts a thread receives, and the slots; the thread
    has connections of its own, made of the layers' group."""
    if isa is not None:
        os.environ["CONCLAVE_ISA"] = isa
    model = Model(name, 2, rank, dist.group.WORLD)
    state = vllm.EplbState(config())
    of_model = state.add_model(model)
    old = of_model.physical_to_logical_map.tolist()
    state.start_async_loop()
    state.rearrange(global_expert_loads=[skewed(model)])
    seen = []
    while of_model.rebalanced:
        seen.append(model())
        state.step()
    seen.append(model())
    return seen, model.expected, old, of_model.physical_to_logical_map.tolist()


def with_a_rank_that_differs(rank: int, folder: Any, name: str) -> Any:
    """Ranks that were given other loads do not agree on slots; nothing is written."""
    model = Model(name, 2, rank, dist.group.WORLD)
    state = vllm.EplbState(config())
    of_model = state.add_model(model)
    before = [rows_of(layer) for layer in model.moe_layers]
    slots = of_model.physical_to_logical_map.tolist()
    load = skewed(model) if rank == 0 else skewed(model).flip(1)
    try:
        state._rearrange(of_model, load)
        error = None
    except conclave.ConclaveCommError as caught:
        error = (caught.name, str(caught))
    same = all(
        torch.equal(a, b)
        for layer, rows in zip(model.moe_layers, before, strict=True)
        for a, b in zip(layer.get_expert_weights(), rows, strict=True)
    )
    return error, same, of_model.physical_to_logical_map.tolist() == slots


def with_a_rank_that_leaves(rank: int, folder: Any, name: str) -> Any:
    """A rank that ends is named by the other."""
    model = Model(name, 2, rank, dist.group.WORLD)
    state = vllm.EplbState(config())
    state.add_model(model)
    model()
    state.step()
    if rank == 1:
        return None
    state.rearrange()
    return None
