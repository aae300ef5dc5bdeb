#!/usr/bin/env python3
"""Tokens per second of gpt-oss-20b cut to a few layers on a GPU, in mxfp4: transformers and ours.

Layers have the released sizes and types. Weights are random, written as a checkpoint under the
released names and read by transformers; the vocabulary is cut as the layers are. All are measured
in turn, several rounds, and the best of each counts:

  mxfp4                what transformers takes: experts in mxfp4, on Triton's matmul_ogs
  grouped_mm, eager    the experts in bf16, dequantised while they are read
  patch                experts in mxfp4 too, their blocks replaced by conclave.transformers.patch

transformers fetches matmul_ogs from a hub. Here it comes from a folder, of the version that
transformers asks for: torch-ext/gpt_oss_triton_kernels below gpt-oss-triton-kernels in
github.com/huggingface/kernels-community. The package `kernels` is not needed.

    PYTHONPATH=build/release/python python3 bench/python/gpt_oss_cuda.py \\
        --triton-kernels FOLDER/gpt_oss_triton_kernels --markdown results.md

Triton compiles in the first round. `--limit` starts no further round once its seconds have passed.
`--tiny --device cpu` only tries the program: without a GPU transformers dequantises, and mxfp4 is
left out.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys
import tempfile
import time

import generate_cuda as common
import torch
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config

SUBJECTS = ("mxfp4", "grouped_mm", "eager", "patch")
LABELS = {
    "mxfp4": "mxfp4 of transformers (matmul_ogs)",
    "grouped_mm": "bf16, `grouped_mm`",
    "eager": "bf16, `eager`",
    "patch": "conclave, `patch`",
}
RELEASED = {"layers": 24, "vocab": 201088}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_local_experts": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
COMPARED = 64  # tokens at the end of a prompt


def arguments() -> argparse.Namespace:
    parser = common.common_parser(__doc__.partition("\n")[0], SUBJECTS)
    parser.set_defaults(rounds=3)
    parser.add_argument("--triton-kernels", type=pathlib.Path, help="gpt_oss_triton_kernels")
    parser.add_argument("--attention", default="eager", help="transformers' attn_implementation")
    parser.add_argument("--limit", type=float, default=100, help="seconds")
    parser.add_argument("--folder", help="for the checkpoint, of 2 GB; kept while it is read")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes to try the program with")
    options = parser.parse_args()
    if options.tiny:
        options.layers, options.prompts, options.batches = 2, [16, 80], [1, 2]
        options.tokens, options.context, options.new = [1, 8], 8, 4
    options.vocab = options.vocab or common.cut_vocabulary(options.layers, RELEASED)
    if options.device == "cpu":
        options.only = [name for name in options.only if name != "mxfp4"]
    elif options.triton_kernels is None and {"mxfp4", "patch"} & set(options.only):
        parser.error(
            "mxfp4 and patch need --triton-kernels, without which transformers dequantises"
        )
    return options


def config_of(options: argparse.Namespace) -> GptOssConfig:
    """gpt-oss-20b; what is not said here is the default of the class."""
    sizes = {"num_local_experts": 32, "num_experts_per_tok": 4}
    return GptOssConfig(
        **sizes | (TINY if options.tiny else {}),
        num_hidden_layers=options.layers,
        vocab_size=options.vocab,
        eos_token_id=None,
        pad_token_id=None,
        dtype="bfloat16",
        quantization_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    )


def random_tensors(config: GptOssConfig, device: str) -> dict[str, torch.Tensor]:
    """A checkpoint's, by the released names, of sizes that keep activations near 1."""
    with torch.device("meta"):
        parameters = dict(GptOssForCausalLM(config).named_parameters())
    numbers = torch.Generator(device).manual_seed(7)
    tensors = {}
    for name, parameter in parameters.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = parameter.shape
            for part, least, end, shape in (
                ("blocks", 0, 256, (experts, rows, columns // 32, 16)),
                ("scales", 119, 122, (experts, rows, columns // 32)),  # 2^-8 to 2^-6
            ):
                tensors[f"{name}_{part}"] = torch.randint(
                    least, end, shape, generator=numbers, dtype=torch.uint8, device=device
                )
            continue
        values = torch.randn(parameter.shape, generator=numbers, device=device)
        if "norm" in name:
            values = torch.ones_like(values)
        else:
            values *= 0.1 if name.endswith("bias") else 0.02
        tensors[name] = values.to(torch.bfloat16)
    return tensors


def write_model(options: argparse.Namespace, folder: str) -> None:
    config = config_of(options)
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(folder)
    tensors = random_tensors(config, options.device)
    save_file(tensors, pathlib.Path(folder) / "model.safetensors", metadata={"format": "pt"})


def use_triton_kernels(folder: pathlib.Path) -> None:
    """transformers takes the package in this folder for the one that it would fetch."""
    from transformers.integrations import hub_kernels
    from transformers.quantizers import quantizer_mxfp4

    sys.path.insert(0, str(folder.resolve().parent))
    package = importlib.import_module(folder.name)
    hub_kernels.get_kernel = lambda *_, **__: package
    quantizer_mxfp4.is_kernels_available = lambda *_, **__: True


def replace(model: GptOssForCausalLM) -> str:
    """By our blocks; what was replaced."""
    from conclave.transformers import patch

    report = patch(model, release=True)
    print(report, file=sys.stderr, flush=True)
    return ", ".join(sorted({module.replaced or "nothing" for module in report.modules}))


def require_ours(model: GptOssForCausalLM) -> None:
    from conclave.transformers import backend_report

    report = backend_report(model)
    if len(report.ours) != model.config.num_hidden_layers:
        raise SystemExit(f"not all blocks are ours:\n{report}")


def select(model: GptOssForCausalLM, name: str) -> None:
    if name in ("grouped_mm", "eager"):
        model.set_experts_implementation(name)


def bytes_free(options: argparse.Namespace) -> int:
    if options.device == "cpu":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def load(
    name: str, options: argparse.Namespace, folder: str, notes: list[str]
) -> GptOssForCausalLM:
    """The model of a subject, after a first call."""
    is_packed = name in ("mxfp4", "patch") and options.device != "cpu"
    model = GptOssForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        device_map=options.device,
        attn_implementation=options.attention,
        quantization_config=Mxfp4Config(dequantize=not is_packed),
    ).eval()
    kind = type(model.model.layers[0].mlp.experts).__name__
    if is_packed != kind.startswith("Mxfp4"):
        raise SystemExit(f"{name}: transformers made {kind} of the experts")
    if name == "patch":
        notes.append(f"`patch` replaced: {replace(model)}.")
    select(model, name)
    common.prefill(model, common.random_ids(model, options, 1, 1))
    if name == "patch":
        require_ours(model)
    return model


def load_all(
    options: argparse.Namespace, folder: str, found: common.Measured, notes: list[str]
) -> dict[str, GptOssForCausalLM]:
    models: dict[str, GptOssForCausalLM] = {}
    write_model(options, folder)
    for name in options.only:
        other = {"eager": "grouped_mm", "grouped_mm": "eager"}.get(name, "")
        if other in models:
            models[name], found.peaks[name] = models[other], found.peaks[other]
            continue
        before = bytes_free(options)
        models[name] = load(name, options, folder, notes)
        found.peaks[name] = (before - bytes_free(options)) / 2**30
    return models


def median_distances(models: dict[str, GptOssForCausalLM], options: argparse.Namespace) -> str:
    """Of several tokens from the first subject's: a single one may have been given other experts,
    where scores tie in bf16."""
    found = []
    first = None
    for name, model in models.items():
        select(model, name)
        ids = common.random_ids(model, options, 1, options.prompts[0])
        logits = model(ids, logits_to_keep=COMPARED).logits[0].float()
        first = logits if first is None else first
        median = ((logits - first).norm(dim=1) / first.norm(dim=1)).median()
        found.append(f"{name} {float(median):.1e}")
    return f"Median distance of the logits of {len(first)} tokens: {', '.join(found)}."


def run(options: argparse.Namespace) -> tuple[common.Measured, list[str]]:
    """Rates, and what else there is to say of the models."""
    start = time.perf_counter()
    found, notes = common.Measured(), []
    if options.triton_kernels:
        use_triton_kernels(options.triton_kernels)
    with torch.no_grad():
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            models = load_all(options, folder, found, notes)
        notes.append(median_distances(models, options))
        print(notes[-1], file=sys.stderr, flush=True)
        for done in range(1, options.rounds + 1):
            for name, model in models.items():
                select(model, name)
                common.measure(model, name, options, found)
                torch.cuda.empty_cache()
            for name, model in models.items() if done == 1 else ():
                select(model, name)
                common.measure_blocks(model, name, options, found)
            if time.perf_counter() - start > options.limit:
                options.rounds = done
                break
    return found, notes


def main() -> None:
    options = arguments()
    found, notes = run(options)
    config = config_of(options)
    model = (
        f"gpt-oss, {options.layers} layers of E={config.num_local_experts}, "
        f"k={config.num_experts_per_tok}, H={config.hidden_size}, I={config.intermediate_size}, "
        f"mxfp4, {options.attention} attention"
    )
    memory = "memory after a first call, GiB"
    text = common.report(model, options, found, LABELS, memory) + "\n" + " ".join(notes) + "\n"
    common.publish(text, options, found)


if __name__ == "__main__":
    sys.exit(main())
