#!/usr/bin/env python3
"""Times the experts implementations of transformers on the CPU, at real layer sizes.

    python3 bench/peers/transformers_cpu.py --model qwen3-30b-a3b --tokens 1,1024 --threads 2

Weights, inputs and routings are random. Only the experts are timed: routing is given, as in
`conclave bench`. Every token selects distinct experts uniformly at random; the experts a call hits
are then renamed to the next ones on a ring over all experts of one or more layers, so that at
least 1 GiB of other weights is read before an expert is read again. A repetition is one turn of
that ring; its time is divided by its calls.
"""

import argparse
import dataclasses
import json
import math
import platform
import statistics
import sys
import time

import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
BYTES_PER_WEIGHT = 2  # bfloat16
REUSE_DISTANCE_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Shape:
    experts: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.intermediate * BYTES_PER_WEIGHT

    def flops(self, tokens: int) -> int:
        return 6 * tokens * self.top_k * self.hidden * self.intermediate


PRESETS = {
    "mixtral-8x7b": Shape(8, 2, 4096, 14336),
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "olmoe": Shape(64, 8, 2048, 1024),
    "dsv3-ep-shard": Shape(32, 1, 7168, 2048),  # one of eight ranks: a slot per token stays local
}


@dataclasses.dataclass(frozen=True)
class Call:
    """One forward's layer and routing."""

    layer: int
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    experts_hit: int


def make_layers(shape: Shape, generator: torch.Generator) -> list[Qwen3MoeExperts]:
    """As many layers as the reuse distance needs, weights scaled for outputs of order one."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )
    count = math.ceil(REUSE_DISTANCE_BYTES / (shape.experts * shape.expert_bytes))
    layers = []
    for _ in range(count):
        with torch.device("meta"):
            layer = Qwen3MoeExperts(config).to(torch.bfloat16)
        layer = layer.to_empty(device="cpu").requires_grad_(False)
        for weight in (layer.gate_up_proj, layer.down_proj):
            bound = math.sqrt(3.0 / weight.shape[-1])
            weight.uniform_(-bound, bound, generator=generator)
        layers.append(layer)
    return layers


def make_calls(shape: Shape, num_layers: int, tokens: int, generator: torch.Generator) -> list[Call]:
    """One turn of the ring: calls until every expert of every layer has been hit about once."""
    rings = [torch.randperm(shape.experts, generator=generator) for _ in range(num_layers)]
    position = 0
    calls = []
    while position < shape.experts:
        drawn = torch.rand(tokens, shape.experts, generator=generator).topk(shape.top_k, dim=1).indices
        hit, compact = drawn.unique(return_inverse=True)
        for layer, ring in enumerate(rings):
            ids = ring[(compact + position) % shape.experts]
            weights = torch.rand(tokens, shape.top_k, generator=generator).softmax(dim=1).to(torch.bfloat16)
            calls.append(Call(layer, ids, weights, hit.numel()))
        position += hit.numel()
    return calls


def gathered_bytes(shape: Shape, tokens: int) -> int:
    """What batched_mm copies: a gate and up matrix, then a down matrix, for every selected slot."""
    return tokens * shape.top_k * shape.expert_bytes


def time_turn(layers: list[Qwen3MoeExperts], calls: list[Call], hidden: torch.Tensor) -> float:
    start = time.perf_counter()
    for call in calls:
        layers[call.layer](hidden, call.topk_ids, call.topk_weights)
    return (time.perf_counter() - start) * 1e3 / len(calls)


def measure(options, shape: Shape, layers, implementation: str, tokens: int, generator) -> dict:
    calls = make_calls(shape, len(layers), tokens, generator)
    hidden = torch.randn(tokens, shape.hidden, generator=generator).to(torch.bfloat16)
    for layer in layers:
        layer.config._experts_implementation = implementation
    for _ in range(options.warmup):
        time_turn(layers, calls, hidden)
    samples = [time_turn(layers, calls, hidden) for _ in range(options.repetitions)]

    mean = statistics.mean(samples)
    experts_hit = statistics.mean(call.experts_hit for call in calls)
    return {
        "ms_mean": mean,
        "ms_std": statistics.stdev(samples) if len(samples) > 1 else 0.0,
        "ms_median": statistics.median(samples),
        "ms_min": min(samples),
        "experts_hit": experts_hit,
        "gflops": shape.flops(tokens) / mean / 1e6,
        "gbps": experts_hit * shape.expert_bytes / mean / 1e6,
    }


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor()


def print_row(row: dict, style: str) -> None:
    if style == "jsonl":
        print(json.dumps(row), flush=True)
        return
    head = f"| {row['model']} | {row['tokens']} | {row['implementation']} "
    if "skipped" in row:
        print(f"{head}| {row['skipped']} | | | |", flush=True)
        return
    spread = f"{row['ms_mean']:.3f} ± {row['ms_std']:.3f} | {row['ms_median']:.3f} | {row['ms_min']:.3f}"
    print(f"{head}| {spread} | {row['gflops']:.1f} | {row['gbps']:.2f} |", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    comma_list = lambda text: text.split(",")
    parser.add_argument("--model", type=comma_list, default=["qwen3-30b-a3b"], help=", ".join(PRESETS))
    parser.add_argument("--tokens", type=comma_list, default=["1", "16", "64", "256", "1024"])
    parser.add_argument("--implementations", type=comma_list, default=list(IMPLEMENTATIONS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1, help="untimed turns before the repetitions")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--memory-gib", type=float, default=5.0, help="skip batched_mm where its copies exceed this")
    parser.add_argument("--format", choices=("jsonl", "md"), default="md")
    options = parser.parse_args()
    for model in options.model:
        if model not in PRESETS:
            parser.error(f"unknown model {model}; one of {', '.join(PRESETS)}")
    for implementation in options.implementations:
        if implementation not in IMPLEMENTATIONS:
            parser.error(f"unknown implementation {implementation}; one of {', '.join(IMPLEMENTATIONS)}")
    options.tokens = [int(text) for text in options.tokens]
    if min(options.tokens + [options.threads, options.repetitions]) < 1:
        parser.error("tokens, threads and repetitions are at least 1")
    return options


def main() -> int:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    if options.format == "md":
        print("| model | tokens | implementation | ms mean ± std | median | min | GFLOP/s | GB/s |")
        print("|---|---|---|---|---|---|---|---|")
    for model in options.model:
        shape = PRESETS[model]
        generator = torch.Generator().manual_seed(options.seed)
        layers = make_layers(shape, generator)
        for tokens in options.tokens:
            for implementation in options.implementations:
                row = {
                    "implementation": implementation,
                    "model": model,
                    "tokens": tokens,
                    "threads": options.threads,
                    "dtype": "bf16",
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                    "cpu": cpu_name(),
                }
                copies = gathered_bytes(shape, tokens)
                if implementation == "batched_mm" and copies > options.memory_gib * (1 << 30):
                    row["skipped"] = f"copies {copies / (1 << 30):.1f} GiB of weights"
                else:
                    with torch.inference_mode():
                        row |= measure(options, shape, layers, implementation, tokens, generator)
                print_row(row, options.format)
        del layers
    return 0


if __name__ == "__main__":
    sys.exit(main())
