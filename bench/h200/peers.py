#!/usr/bin/env python3
"""Times what other libraries on this machine make of the same products, on an NVIDIA GPU.

    python3 bench/h200/peers.py --cases qwen3-30b,mixtral-8x7b --tokens 1,64,4096 > peers.jsonl

- cublas: two dense products of the same FLOPs through torch.matmul, without any experts.
- grouped_mm: torch's grouped product, twice, on rows sorted beforehand: no permutation, no
  activation, no weighted sum.
- the machine itself: an 8192^3 bf16 product and a kernel that only reads.

CUDA graphs of several forwards, each routed differently, as in layer_bench. JSON lines.
"""

import argparse
import importlib.util
import json
import statistics
import sys

import torch

# As tests/support/cuda/cases.cc: experts, k, hidden, intermediate.
CASES = {
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "qwen3-30b": (128, 8, 2048, 768),
    "qwen3-235b": (128, 8, 4096, 1536),
    "olmoe": (64, 8, 2048, 1024),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "deepseek-v3": (256, 8, 7168, 2048),
    "dsv3-ep8": (32, 1, 7168, 2048),
}
TOKENS = [1, 4, 16, 64, 256, 1024, 4096, 16384]
SHARD_FROM_TOKENS = 256


def routings_per_graph(tokens: int) -> int:
    return 8 if tokens <= 64 else 3 if tokens <= 1024 else 1


def time_graph(forwards: list, seconds: float = 0.05) -> float:
    """Median microseconds of one of `forwards`."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for forward in forwards:
            forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for forward in forwards:
            forward()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    replay()
    replays = min(30, max(3, int(seconds * 1e6 / replay())))
    return statistics.median(replay() for _ in range(replays)) / len(forwards)


def normal(*shape: int, deviation: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=deviation)


def product_tflops(size: int = 8192) -> float:
    a, b = normal(size, size), normal(size, size)
    out = torch.empty_like(a)
    # A few milliseconds: a longer run meets the power limit, which a single layer does not.
    return 2e-6 * size**3 / time_graph([lambda: torch.matmul(a, b, out=out)], seconds=0.005)


def read_tbps(bytes_: int = 8 << 30) -> float:
    """The faster of torch's sum and, where Triton is there, a kernel that only reads."""
    data = torch.empty(bytes_ // 4, dtype=torch.int32, device="cuda").random_()
    best = bytes_ / time_graph([lambda: torch.max(data)]) * 1e-6
    if importlib.util.find_spec("triton") is not None:
        from read_stream import read_all  # beside this file: a Triton function needs one

        sink = torch.zeros(1, dtype=torch.int32, device="cuda")
        best = max(best, bytes_ / time_graph([lambda: read_all(data, sink)]) * 1e-6)
    return best


def routings(tokens: int, experts: int, k: int) -> list:
    """Sorted rows of each routing as the end of each expert's."""
    ends = []
    for _ in range(routings_per_graph(tokens)):
        ids = torch.rand(tokens, experts, device="cuda").topk(k, dim=1).indices
        ends.append(torch.bincount(ids.flatten(), minlength=experts).cumsum(0).to(torch.int32))
    return ends


def cublas_us(tokens: int, sizes: tuple) -> float:
    _, k, hidden, inner = sizes
    x, y = normal(tokens * k, hidden), normal(tokens * k, inner)
    up, down = normal(2 * inner, hidden), normal(hidden, inner)

    def forward():
        torch.matmul(x, up.t())
        torch.matmul(y, down.t())

    return time_graph([forward])


def grouped_mm_us(tokens: int, sizes: tuple, up: torch.Tensor, down: torch.Tensor) -> float:
    experts, k, hidden, inner = sizes
    grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    x, y = normal(tokens * k, hidden), normal(tokens * k, inner)

    def forward(ends):
        grouped(x, up.transpose(1, 2), offs=ends)
        grouped(y, down.transpose(1, 2), offs=ends)

    return time_graph([lambda e=e: forward(e) for e in routings(tokens, experts, k)])


def emit(**fields) -> None:
    print(json.dumps(fields), flush=True)


def run_case(name: str, tokens_list: list) -> None:
    experts, _, hidden, inner = CASES[name]
    up = normal(experts, 2 * inner, hidden, deviation=hidden**-0.5)
    down = normal(experts, hidden, inner, deviation=inner**-0.5)
    for tokens in tokens_list:
        if name == "dsv3-ep8" and tokens < SHARD_FROM_TOKENS:
            continue
        emit(peer="cublas", case=name, tokens=tokens, us=round(cublas_us(tokens, CASES[name]), 2))
        try:
            us = grouped_mm_us(tokens, CASES[name], up, down)
            emit(peer="grouped_mm", case=name, tokens=tokens, us=round(us, 2))
        except RuntimeError as error:
            print(f"grouped_mm {name} {tokens}: {str(error).splitlines()[0]}", file=sys.stderr)
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    options = parser.parse_args()
    emit(
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cudnn_frontend=importlib.util.find_spec("cudnn") is not None,
        read_tbps=round(read_tbps(), 3),
        product_tflops=round(product_tflops(), 1),
    )
    torch.cuda.empty_cache()
    for name in filter(None, options.cases.split(",")):  # none: the machine alone
        run_case(name, [int(t) for t in options.tokens.split(",")])
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
