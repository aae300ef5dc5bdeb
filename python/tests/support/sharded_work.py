"""What ranks of test_transformers_parallel.py do, each in a process of its own."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
import transformers

import conclave.transformers
from conclave.transformers._traits import NotOurs
from support import models


def made(name: str) -> Any:
    """A random model of a family of testdata, with heads enough for two ranks."""
    cls, config = models.config_of(name)
    heads = 4 if hasattr(config, "kv_lora_rank") else 2
    fields = {"num_attention_heads": 4, "num_key_value_heads": heads, "eos_token_id": None}
    config = type(config).from_dict(
        config.to_dict() | fields | {"pad_token_id": 0, "tie_word_embeddings": False}
    )
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(7)
    model = cls._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.copy_(torch.randn(weights.shape) * 0.15)
    return model.eval()


def spread(name: str, rank: int, **sizes: int) -> Any:
    """What `made` returns, over all ranks by its own plan, as `from_pretrained` does it."""
    from transformers.distributed import DistributedConfig

    world = dist.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    model = made(name)
    config, _, meshes = model.prepare_distribute_model(DistributedConfig(**sizes))
    return model.maybe_distribute_model(model, config, meshes)


def results(model: Any) -> tuple[torch.Tensor, list[list[int]]]:
    """Logits of a prompt, and greedy tokens."""
    ids = models.prompt()
    with torch.no_grad():
        logits = model(ids).logits
        tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
    return logits.float(), tokens.tolist()


def gradients(model: Any) -> float:
    """Of the logits' sum of squares by the router of a block."""
    model.zero_grad()
    model(models.prompt()).logits.square().sum().backward()
    return sum(
        float(p.grad.norm()) for n, p in model.named_parameters() if n.endswith("mlp.gate.weight")
    )


def blocks(rank: int, folder: Any, plans: list[tuple[str, dict[str, int]]]) -> Any:
    """For each model and plan: results of the plan itself, of patched blocks, and of both after an
    update of the weights; gradients, kinds and reports."""
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    found = []
    for name, sizes in plans:
        model = spread(name, rank, **sizes)
        own = results(model)
        report = conclave.transformers.patch(model)
        patched, slope = results(model), gradients(model)
        with torch.no_grad():
            for weights in model.parameters():
                weights.mul_(1.25)
        changed = results(model)
        calls = str(conclave.transformers.backend_report(model))
        conclave.transformers.unpatch(model)
        kinds = [m.replaced for m in report.modules]
        found.append((own, patched, changed, results(model), slope, kinds, f"{report}\n{calls}"))
    return found


def with_fsdp(rank: int, folder: Any, name: str) -> Any:
    """A model that FSDP spreads is left as it is."""
    from torch.distributed.fsdp import fully_shard

    transformers.logging.set_verbosity_error()
    model = made(name)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    report = conclave.transformers.patch(model)
    with torch.no_grad():
        return [(m.replaced, m.reason) for m in report.modules], model(models.prompt()).logits


def with_a_rank_that_refuses(rank: int, folder: Any, name: str) -> Any:
    """One rank finds that the whole block is another formula: none replaces it."""
    from conclave.transformers import _block

    transformers.logging.set_verbosity_error()
    model = spread(name, rank, tp_size=dist.get_world_size())
    if rank == 1:

        def refuse(*_: Any) -> None:
            raise NotOurs("told to")

        _block.PatchedBlock._find_norm = refuse
    report = conclave.transformers.patch(model)
    return [(m.replaced, m.reason) for m in report.modules], results(model)


def with_a_rank_that_fails(rank: int, folder: Any, name: str) -> Any:
    """One rank meets an error that no replacement expects, at its second block: what each raised,
    the model's own results afterwards, and those of a second attempt."""
    from conclave.transformers import _block

    transformers.logging.set_verbosity_error()
    model = spread(name, rank, tp_size=dist.get_world_size())
    find_norm, blocks = _block.PatchedBlock._find_norm, []

    def fail(self: Any, *found: Any) -> None:
        blocks.append(self)
        if rank == 1 and len(blocks) == 2:
            raise ZeroDivisionError
        find_norm(self, *found)

    _block.PatchedBlock._find_norm = fail
    raised: Any = None
    try:
        conclave.transformers.patch(model)
    except (ZeroDivisionError, conclave.ConclaveCommError) as error:
        raised = error
    said = type(raised).__name__, getattr(raised, "peer", -1), str(raised)
    left = results(model)
    _block.PatchedBlock._find_norm = find_norm
    kinds = {m.replaced for m in conclave.transformers.patch(model).modules}
    return said, left, kinds, results(model)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(models.prompt()).logits.float()


def refitted(rank: int, folder: Any, plans: list[tuple[str, dict[str, int]]]) -> Any:
    """For each model and plan, what came of refits that rank 1 may not begin, of one in which it
    raises, and logits after them, after one that all ranks commit, and of the plan itself with the
    weights that this left."""
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    found = []
    for name, sizes in plans:
        state = {key: tensor * 1.25 for key, tensor in made(name).named_parameters()}
        model = spread(name, rank, **sizes)
        conclave.transformers.patch(model)
        raised: Any = None
        refused = []
        for wrong in ({"mode": "hot"}, {"epoch": 0}, {"paths": ["none"]}, {"threads": "two"}):
            try:
                with conclave.transformers.refit(model, **(wrong if rank == 1 else {})) as new:
                    new.stage(state)
            except (conclave.Error, TypeError) as error:
                refused.append((type(error).__name__, getattr(error, "peer", -1), str(error)))
        try:
            with conclave.transformers.refit(model) as new:
                new.stage(state)
                if rank == 1:
                    raise ZeroDivisionError
        except (ZeroDivisionError, conclave.ConclaveCommError) as error:
            raised = error
        kept = logits_of(model)
        with conclave.transformers.refit(model, epoch=4) as new:
            new.stage(state)
        changed = logits_of(model)
        conclave.transformers.unpatch(model)
        given_back = logits_of(model)
        said = type(raised).__name__, getattr(raised, "peer", -1)
        found.append((*said, refused, kept, changed, given_back))
    return found
