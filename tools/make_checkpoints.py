#!/usr/bin/env python3
"""Makes the tiny checkpoints of testdata/ with transformers, and reference results beside them.

    python3 tools/make_checkpoints.py                      remake all of testdata/
    python3 tools/make_checkpoints.py --name olmoe-tiny    remake one
    python3 tools/make_checkpoints.py --check olmoe-tiny   remake it aside and compare

Needs the packages of tools/requirements-checkpoints.txt. testdata/README.md describes the result.
"""

import argparse
import dataclasses
import json
import pathlib
import shutil
import sys
import tempfile
import zlib

import numpy as np
import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file

from checkpoint_float64 import BlockResult, Checkpoint, worst_relative_error

TESTDATA = pathlib.Path(__file__).resolve().parent.parent / "testdata"
VOCABULARY = 160

COMMON = dict(
    vocab_size=VOCABULARY,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One checkpoint: its architecture, type, prompt length and seed."""

    config: transformers.PretrainedConfig
    dtype: torch.dtype
    tokens: int
    seed: int
    max_shard_size: str = "50GB"


RECIPES = {
    "mixtral-tiny": Recipe(
        transformers.MixtralConfig(
            **COMMON, hidden_size=72, intermediate_size=40, num_hidden_layers=2,
            num_local_experts=8, num_experts_per_tok=2,
        ),
        dtype=torch.bfloat16, tokens=16, seed=101,
    ),
    "qwen2-moe-tiny": Recipe(
        transformers.Qwen2MoeConfig(
            **COMMON, hidden_size=56, intermediate_size=60, num_hidden_layers=4,
            moe_intermediate_size=36, shared_expert_intermediate_size=44,
            num_experts=10, num_experts_per_tok=3, norm_topk_prob=False,
            decoder_sparse_step=1, mlp_only_layers=[1],
        ),
        dtype=torch.float32, tokens=17, seed=202,
    ),
    "qwen3-moe-tiny": Recipe(
        transformers.Qwen3MoeConfig(
            **COMMON, hidden_size=88, intermediate_size=96, head_dim=16, num_hidden_layers=3,
            moe_intermediate_size=24, num_experts=60, num_experts_per_tok=4, norm_topk_prob=True,
            decoder_sparse_step=1, mlp_only_layers=[],
        ),
        dtype=torch.bfloat16, tokens=20, seed=303, max_shard_size="700KB",
    ),
    "olmoe-tiny": Recipe(
        transformers.OlmoeConfig(
            **COMMON, hidden_size=64, intermediate_size=45, num_hidden_layers=2,
            num_experts=6, num_experts_per_tok=3, norm_topk_prob=False,
        ),
        dtype=torch.float16, tokens=13, seed=404,
    ),
}


def fill_parameters(model: torch.nn.Module, seed: int) -> None:
    """Random weights, each from its own stream, scaled so that block outputs are of order one."""
    for name, parameter in model.named_parameters():
        stream = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
        values = stream.standard_normal(parameter.shape)
        if "norm" in name:
            values = 1.0 + 0.1 * values
        elif name.endswith("bias"):
            values = 0.1 * values
        elif "embed_tokens" not in name:
            # Gain: wide logits make the routing decisive, wide gates exercise the activation.
            gain = 2.0 if name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight")) else 1.5
            values *= gain / np.sqrt(parameter.shape[-1])
        parameter.data.copy_(torch.from_numpy(values))


def save_model(recipe: Recipe, directory: pathlib.Path) -> None:
    config = transformers.AutoConfig.for_model(**recipe.config.to_dict())
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill_parameters(model, recipe.seed)
    model.to(recipe.dtype)
    model.save_pretrained(directory, max_shard_size=recipe.max_shard_size)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What transformers computed in one MoE block, ids and weights in our order."""

    hidden_states: torch.Tensor
    router_logits: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    output: torch.Tensor


def record_blocks(model: torch.nn.Module, layers: list[int], input_ids: list[int]) -> dict[int, Recorded]:
    """Runs the model on one prompt and hooks the input, the routing and the output of every MoE block."""
    seen: dict[tuple[int, str], tuple] = {}
    handles = []
    for layer in layers:
        block = model.model.layers[layer].mlp
        keep_block = lambda _, args, out, n=layer: seen.update({(n, "block"): (args[0], out)})
        keep_gate = lambda _, args, out, n=layer: seen.update({(n, "gate"): out})
        handles += [block.register_forward_hook(keep_block), block.gate.register_forward_hook(keep_gate)]
    with torch.no_grad():
        model(torch.tensor([input_ids]), use_cache=False)
    for handle in handles:
        handle.remove()

    recorded = {}
    for layer in layers:
        hidden_states, output = (t[0].contiguous() for t in seen[layer, "block"])
        logits, weights, ids = seen[layer, "gate"]
        ids, by_id = ids.sort(dim=1)
        weights, by_weight = weights.gather(1, by_id).sort(dim=1, descending=True, stable=True)
        ids = ids.gather(1, by_weight).to(torch.int32)
        recorded[layer] = Recorded(hidden_states, logits.float(), ids, weights.float(), output)
    return recorded


def run_float64(checkpoint: Checkpoint, recorded: dict[int, Recorded]) -> dict[int, BlockResult]:
    return {n: checkpoint.run_block(n, blocks.hidden_states) for n, blocks in recorded.items()}


def choose_prompt(model: torch.nn.Module, checkpoint: Checkpoint, recipe: Recipe) -> list[int]:
    """Grows a prompt token by token, keeping only tokens that every layer routes decisively.

    Attention is causal, so a token that was decisive stays so as the prompt grows.
    """
    stream = np.random.Generator(np.random.PCG64([recipe.seed, zlib.crc32(b"prompt")]))
    prompt: list[int] = []
    while len(prompt) < recipe.tokens:
        for candidate in stream.permutation(VOCABULARY):
            trial = prompt + [int(candidate)]
            blocks = run_float64(checkpoint, record_blocks(model, checkpoint.moe_layers(), trial))
            if all(block.decisive.all() for block in blocks.values()):
                prompt = trial
                break
        else:
            raise SystemExit(f"seed {recipe.seed}: no token keeps the routing decisive after {prompt}")
    return prompt


def honest_error(recipe: Recipe) -> float:
    """Per-token relative L2 distance an honest run may have from float64.

    Intermediates rounded to the model's type cost up to two of its epsilons, float32 sums over the
    hidden size at most one float32 epsilon per term.
    """
    return 2.0 * torch.finfo(recipe.dtype).eps + recipe.config.hidden_size * torch.finfo(torch.float32).eps


def judge(name: str, layer: int, recipe: Recipe, recorded: Recorded, exact: BlockResult) -> dict:
    """Compares transformers' block with float64; disagreement means one of the two is wrong."""
    if not exact.decisive.all():
        raise SystemExit(f"{name} layer {layer}: routing is not decisive for every token")
    if not np.array_equal(recorded.topk_ids.numpy(), exact.topk_ids):
        raise SystemExit(f"{name} layer {layer}: transformers selected other experts than float64")
    report = {
        "output_error": worst_relative_error(recorded.output, exact.output),
        "weights_error": worst_relative_error(recorded.topk_weights, exact.topk_weights),
        "output_rms": float(np.sqrt(np.mean(exact.output**2))),
        "experts_hit": int(np.unique(exact.topk_ids).size),
    }
    limit = honest_error(recipe)
    if not report["output_error"] <= limit:
        raise SystemExit(f"{name} layer {layer}: error {report['output_error']:.2e} above {limit:.2e}")
    return report


def load_model(directory: pathlib.Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", experts_implementation="eager", attn_implementation="eager"
    ).eval()


def record(name: str, recipe: Recipe, directory: pathlib.Path, prompt: list[int] | None = None) -> None:
    """Writes transformers.safetensors and reference.safetensors beside the model in directory."""
    checkpoint = Checkpoint(directory)
    model = load_model(directory)
    prompt = prompt or choose_prompt(model, checkpoint, recipe)
    recorded = record_blocks(model, checkpoint.moe_layers(), prompt)
    exact = run_float64(checkpoint, recorded)

    reports = {n: judge(name, n, recipe, recorded[n], exact[n]) for n in recorded}
    for layer, report in reports.items():
        figures = "  ".join(f"{key} {value:.3g}" for key, value in report.items())
        print(f"{name:15} layer {layer}  {figures}", flush=True)

    provenance = {
        "made_by": "tools/make_checkpoints.py",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seed": recipe.seed,
        "input_ids": prompt,
        "transformers_error": {str(n): f"{r['output_error']:.2e}" for n, r in reports.items()},
    }
    theirs = {f"layers.{n}.{key}": value for n, r in recorded.items() for key, value in vars(r).items()}
    save(directory / "transformers.safetensors", theirs, provenance | {"output": "transformers, model dtype"})
    ours = {}
    for n, result in exact.items():
        ours[f"layers.{n}.hidden_states"] = recorded[n].hidden_states
        ours[f"layers.{n}.router_logits"] = torch.from_numpy(result.router_logits)
        ours[f"layers.{n}.topk_ids"] = torch.from_numpy(result.topk_ids)
        ours[f"layers.{n}.topk_weights"] = torch.from_numpy(result.topk_weights).float()
        ours[f"layers.{n}.output"] = torch.from_numpy(result.output)
    save(directory / "reference.safetensors", ours, provenance | {"output": "float64 recomputation"})


def save(path: pathlib.Path, tensors: dict[str, torch.Tensor], provenance: dict) -> None:
    # One metadata key: the writer orders several keys at random, and the bytes are to be reproducible.
    metadata = {"provenance": json.dumps(provenance, sort_keys=True)}
    save_file({key: value.contiguous() for key, value in tensors.items()}, path, metadata)


def read_provenance(path: pathlib.Path) -> dict:
    with safetensors.safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["provenance"])


def make(name: str) -> None:
    directory = TESTDATA / name
    shutil.rmtree(directory, ignore_errors=True)
    save_model(RECIPES[name], directory)
    record(name, RECIPES[name], directory)


def compare_results(name: str, file: str, committed: pathlib.Path, remade: pathlib.Path) -> list[str]:
    """Recorded tensors may differ in the last bits between CPUs; ids may not."""
    old, new = load_file(committed / file), load_file(remade / file)
    if old.keys() != new.keys():
        return [f"{name}/{file}: other tensors than committed"]
    limit = honest_error(RECIPES[name])
    problems = []
    for key in old:
        if old[key].shape != new[key].shape or old[key].dtype != new[key].dtype:
            problems.append(f"{name}/{file}: {key} has another shape or type")
        elif key.endswith("topk_ids"):
            if not torch.equal(old[key], new[key]):
                problems.append(f"{name}/{file}: {key} differs")
        else:
            error = worst_relative_error(new[key], old[key].double().numpy())
            if not error <= limit:
                problems.append(f"{name}/{file}: {key} differs by {error:.2e}, limit {limit:.2e}")
    return problems


def check_recomputation(name: str, committed: pathlib.Path) -> list[str]:
    """Float64 from the committed weights and the committed inputs, to the last few bits."""
    checkpoint = Checkpoint(committed)
    reference = load_file(committed / "reference.safetensors")
    problems = []
    for layer in checkpoint.moe_layers():
        exact = checkpoint.run_block(layer, reference[f"layers.{layer}.hidden_states"])
        same_ids = np.array_equal(exact.topk_ids, reference[f"layers.{layer}.topk_ids"].numpy())
        error = worst_relative_error(reference[f"layers.{layer}.output"], exact.output)
        if not (same_ids and error <= 1e-12):
            problems.append(f"{name} layer {layer}: float64 differs (ids equal: {same_ids}, output {error:.2e})")
    return problems


def check(name: str) -> list[str]:
    """Remakes a checkpoint aside: model files byte for byte, results within the type's rounding."""
    committed = TESTDATA / name
    results = ("reference.safetensors", "transformers.safetensors")
    with tempfile.TemporaryDirectory() as scratch:
        remade = pathlib.Path(scratch) / name
        save_model(RECIPES[name], remade)
        prompt = read_provenance(committed / results[0])["input_ids"]
        record(name, RECIPES[name], remade, prompt)

        old_files = {path.name for path in committed.iterdir()}
        new_files = {path.name for path in remade.iterdir()}
        problems = [f"{name}: only in one of the two: {file}" for file in sorted(old_files ^ new_files)]
        for file in sorted((old_files & new_files).difference(results)):
            if (committed / file).read_bytes() != (remade / file).read_bytes():
                problems.append(f"{name}/{file}: bytes differ")
        for file in results:
            same = (committed / file).read_bytes() == (remade / file).read_bytes()
            print(f"{name}/{file}: {'same bytes' if same else 'other bytes, comparing values'}")
            problems += compare_results(name, file, committed, remade)
    return problems + check_recomputation(name, committed)


def configure() -> None:
    """One thread and deterministic kernels, so that a run can be repeated bit for bit."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", choices=RECIPES, help="remake only this checkpoint")
    parser.add_argument("--check", choices=RECIPES, metavar="NAME", help="remake aside and compare with the committed one")
    options = parser.parse_args()

    configure()
    if options.check:
        problems = check(options.check)
        print("\n".join(problems) if problems else f"{options.check}: as committed")
        return 1 if problems else 0
    for name in [options.name] if options.name else RECIPES:
        make(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
