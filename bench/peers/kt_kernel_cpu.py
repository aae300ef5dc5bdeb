#!/usr/bin/env python3
"""Times the AMX experts of kt-kernel (the wheel kt-kernel 0.7.2, unpacked) on the CPU, at real layer sizes.

    python3 bench/peers/kt_kernel_cpu.py --extension FOLDER/kt_kernel/_kt_kernel_ext_amx.cpython-312-x86_64-linux-gnu.so \\
        --model qwen3-30b-a3b --types bf16,int8,int4 --tokens 1,1024 --threads 15

Its extension module is loaded by itself, which needs numpy alone. Routing, its ring over all experts and repetitions are
those of transformers_cpu.py beside this file. kt-kernel's caller spins, so that as many threads as cores are slow: try
one and two fewer. Before it is timed, an output of each type is held to float64 of the weights in bf16; int8 and int4 have
one scale a row, which the error shows.
"""

import argparse
import importlib.util
import json
import math
import statistics
import time

import numpy

PRESETS = {"qwen3-30b-a3b": (128, 8, 2048, 768), "mixtral-8x7b": (8, 2, 4096, 14336), "olmoe": (64, 8, 2048, 1024)}
TYPES = {"bf16": ("AMXBF16_MOE", 2.0), "int8": ("AMXInt8_MOE", 1.0), "int4": ("AMXInt4_MOE", 0.5)}
REUSE_DISTANCE_BYTES = 1 << 30
LEAST_SECONDS = 0.5  # of a type's timed turns


def load(path: str):
    spec = importlib.util.spec_from_file_location("kt_kernel_ext", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def to_bf16(values: numpy.ndarray) -> numpy.ndarray:
    """float32 -> the bits of bf16 as uint16, to nearest."""
    bits = values.astype(numpy.float32).view(numpy.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(numpy.uint16)


def to_float64(bits: numpy.ndarray) -> numpy.ndarray:
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32).astype(numpy.float64)


class Experts:
    """gate and up [E, I, H] and down [E, H, I] as bf16, of which every layer holds a packed copy of its own."""

    def __init__(self, sizes: tuple, rng: numpy.random.Generator):
        experts, _, hidden, inner = sizes
        self.sizes = sizes
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        self.matrices = {}
        for name, (rows, cols) in shapes.items():
            stack = numpy.empty((experts, rows, cols), numpy.uint16)
            for expert in range(experts):
                drawn = rng.random((rows, cols), dtype=numpy.float32)
                stack[expert] = to_bf16((2 * drawn - 1) * math.sqrt(3.0 / cols))
            self.matrices[name] = stack

    def layer(self, kt, infer, kind: str, most_tokens: int):
        experts, top_k, hidden, inner = self.sizes
        config = kt.moe.MOEConfig(experts, top_k, hidden, inner, 0)
        # Its tiles have 32 rows.
        config.max_len, config.pool = (most_tokens + 31) // 32 * 32, infer.backend_
        config.gate_proj, config.up_proj, config.down_proj = (
            self.matrices[name].ctypes.data for name in ("gate", "up", "down")
        )
        made = getattr(kt.moe, TYPES[kind][0])(config)
        identity = numpy.arange(experts, dtype=numpy.int64)
        infer.submit(made.load_weights_task(identity.ctypes.data))
        infer.sync()
        return made

    def expected(self, row: numpy.ndarray, ids: numpy.ndarray, weights: numpy.ndarray) -> numpy.ndarray:
        out = 0.0
        for expert, weight in zip(ids, weights):
            gate, up, down = (to_float64(self.matrices[name][expert]) for name in ("gate", "up", "down"))
            g = gate @ to_float64(row)
            out = out + float(weight) * (down @ (g / (1 + numpy.exp(-g)) * (up @ to_float64(row))))
        return out


class Call:
    """One forward's layer, routing and memory."""

    def __init__(self, layer, ids: numpy.ndarray, weights: numpy.ndarray, hidden: numpy.ndarray, experts_hit: int):
        self.layer, self.ids, self.weights, self.hidden, self.experts_hit = layer, ids, weights, hidden, experts_hit
        self.tokens = numpy.array([hidden.shape[0]], numpy.int32)
        self.out = numpy.empty_like(hidden)

    def run(self, infer) -> None:
        addresses = (a.ctypes.data for a in (self.ids, self.weights, self.hidden, self.out))
        infer.submit(self.layer.forward_task(self.tokens.ctypes.data, self.ids.shape[1], *addresses, False))
        infer.sync()


def make_calls(layers: list, sizes: tuple, tokens: int, rng: numpy.random.Generator) -> list:
    """One turn of the ring: calls until every expert of every layer has been hit about once."""
    experts, top_k, hidden, _ = sizes
    rings = [rng.permutation(experts) for _ in layers]
    rows = to_bf16(rng.standard_normal((tokens, hidden), dtype=numpy.float32))
    position, calls = 0, []
    while position < experts:
        drawn = numpy.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k]
        hit, compact = numpy.unique(drawn, return_inverse=True)
        for layer, ring in zip(layers, rings):
            ids = ring[(compact.reshape(tokens, top_k) + position) % experts].astype(numpy.int64)
            weights = rng.random((tokens, top_k), dtype=numpy.float32)
            calls.append(Call(layer, ids, weights / weights.sum(1, keepdims=True), rows, hit.size))
        position += hit.size
    return calls


def time_turn(calls: list, infer) -> float:
    """Milliseconds of a call."""
    start = time.perf_counter()
    for call in calls:
        call.run(infer)
    return (time.perf_counter() - start) * 1e3 / len(calls)


def error_of(source: Experts, call: Call, infer) -> float:
    """The relative L2 error of the worse of the first and the last token."""
    call.out.fill(0x7FC0)
    call.run(infer)
    worst = 0.0
    for token in {0, call.hidden.shape[0] - 1}:
        expected = source.expected(call.hidden[token], call.ids[token], call.weights[token])
        difference = to_float64(call.out[token]) - expected
        worst = max(worst, float(numpy.linalg.norm(difference) / numpy.linalg.norm(expected)))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extension", required=True)
    parser.add_argument("--model", default="qwen3-30b-a3b", help=f"{', '.join(PRESETS)}, or ExkxHxI")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--tokens", default="1,64,1024,4096")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    sizes = PRESETS.get(options.model) or tuple(int(n) for n in options.model.split("x"))
    tokens_list = [int(t) for t in options.tokens.split(",")]
    kt, rng = load(options.extension), numpy.random.default_rng(1)
    pool = kt.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [options.threads]
    infer = kt.CPUInfer(pool)
    source = Experts(sizes, rng)
    for kind in options.types.split(","):
        layer_bytes = 3 * sizes[0] * sizes[2] * sizes[3] * TYPES[kind][1]
        count = math.ceil(REUSE_DISTANCE_BYTES / layer_bytes)
        layers = [source.layer(kt, infer, kind, max(tokens_list)) for _ in range(count)]
        for tokens in tokens_list:
            calls = make_calls(layers, sizes, tokens, rng)
            error = error_of(source, calls[0], infer)
            time_turn(calls, infer)
            samples, begun = [], time.perf_counter()
            while len(samples) < options.repetitions or time.perf_counter() - begun < LEAST_SECONDS:
                samples.append(time_turn(calls, infer))
            row = {"type": kind, "tokens": tokens, "threads": options.threads, "layers": count,
                   "ms_median": round(statistics.median(samples), 4), "ms_min": round(min(samples), 4),
                   "n": len(samples), "experts_hit": calls[0].experts_hit, "error": float(f"{error:.2e}")}
            print(json.dumps(row), flush=True)
        del layers


if __name__ == "__main__":
    main()
