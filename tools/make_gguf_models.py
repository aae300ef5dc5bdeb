#!/usr/bin/env python3
"""Writes testdata/gguf/NAME/: small GGUF models of many architectures and their layers' results.

gguf-py's GGUFWriter writes model.gguf, or its parts. Weights are random: quantised by gguf-py where
it can, else random blocks with ordinary scales. reference.safetensors has `layers.N.hidden` (f32),
`layers.N.topk_ids` and `layers.N.output` of each MoE layer N: a float64 computation, written here
from llama.cpp's definition of the architectures, of the weights as gguf-py dequantises them. Needs
gguf, numpy and safetensors.
"""

import argparse
import dataclasses
import importlib.metadata
import pathlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file

TOKENS = 13
LEAST_SUM = 2.0**-14
# Bytes of a block that are one float16 scale each, for types that gguf-py does not quantise.
SCALES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,),
    "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "Q1_0": (0,),
}  # fmt: skip
# What makes the values of random blocks about as large as those of other weights.
SIZES = {
    "Q2_K": 4e-3, "Q3_K": 1e-3, "Q4_K": 4e-4, "Q5_K": 2e-4, "Q6_K": 4e-5, "IQ2_XXS": 5e-4,
    "IQ2_XS": 5e-4, "IQ2_S": 5e-4, "IQ3_XXS": 4e-4, "IQ3_S": 5e-4, "IQ1_S": 1e-2, "IQ4_NL": 1e-3,
    "IQ4_XS": 5e-5, "TQ1_0": 0.1, "TQ2_0": 0.1, "Q1_0": 0.1,
}  # fmt: skip


@dataclasses.dataclass
class Weights:
    """A tensor as the file stores it, and its values in float64."""

    type: Type
    raw: np.ndarray
    values: np.ndarray


@dataclasses.dataclass
class Model:
    name: str
    arch: str
    experts: int = 6
    top_k: int = 2
    hidden: int = 64
    inner: int = 32
    layers: tuple[int, ...] = (0,)
    block_count: int = 1
    types: tuple[str, str, str] = ("Q8_0", "Q8_0", "Q8_0")  # gate, up, down
    shared_inner: int = 0
    shared_types: tuple[str, str, str] = ("F32", "F32", "F32")
    score: str = "softmax"
    gating_key: int | None = None
    renormalize: bool = True
    scale: float | None = None
    groups: tuple[int, int] | None = None
    chooses_logits: bool = False
    router_bias: bool = False
    selection_bias: str = ""
    activation: str = "silu"
    gated: bool = True
    limits: tuple[float, float] | None = None  # of routed and of shared experts
    biases: bool = False
    shared_mode: str = "add"
    weight_on_input: bool = False
    fused: bool = False
    per_expert: bool = False
    factors: bool = False
    latent: int = 0
    residual: str = ""
    hash_vocabulary: int = 0
    gemma: bool = False
    parts: int = 1
    alignment: int = 32
    keys: dict = dataclasses.field(default_factory=dict)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def random_raw(name: str, rows: int, cols: int, rng) -> np.ndarray:
    elements, size = gguf.GGML_QUANT_SIZES[Type[name]]
    blocks = rng.integers(0, 256, (rows * cols // elements, size), dtype=np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(118, 124, len(blocks))
    elif name == "NVFP4":
        blocks[:, :4] = rng.integers(8, 48, (len(blocks), 4))
    for at in SCALES.get(name, ()):
        scales = (SIZES[name] * rng.uniform(0.5, 1.5, len(blocks))).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def make(name: str, shape: tuple[int, ...], rng, spread: float = 0.1) -> Weights:
    values = (spread * rng.standard_normal(shape)).astype(np.float32)
    if name == "F32":
        return Weights(Type.F32, values, values.astype(np.float64))
    if name == "F16":
        raw = values.astype(np.float16)
        return Weights(Type.F16, raw, raw.astype(np.float64))
    rows, cols = int(np.prod(shape[:-1])), shape[-1]
    try:
        raw = gguf.quants.quantize(values.reshape(rows, cols), Type[name])
    except NotImplementedError:
        raw = random_raw(name, rows, cols, rng)
    dequantised = gguf.quants.dequantize(raw, Type[name]).reshape(shape)
    return Weights(Type[name], raw.reshape(*shape[:-1], -1), dequantised.astype(np.float64))


def activate(model: Model, gate, up, limit: float):
    if model.activation == "relu2":
        return np.maximum(up, 0) ** 2
    if model.activation == "gelu":
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + np.tanh(inner)) * up
    if model.activation == "oai":
        gate = np.minimum(gate, 7)
        return gate * sigmoid(np.float64(np.float32(1.702)) * gate) * (np.clip(up, -7, 7) + 1)
    if model.activation == "before":
        gate = np.minimum(gate, limit)
        return gate * sigmoid(gate) * np.clip(up, -limit, limit)
    silu = gate * sigmoid(gate)
    if limit:
        return np.minimum(silu, limit) * np.clip(up, -limit, limit)
    return silu * up


class Layer:
    """One MoE layer: its tensors, and what it computes."""

    def __init__(self, model: Model, index: int, rng):
        self.model, self.index, self.rng = model, index, rng
        self.tensors: dict[str, Weights] = {}
        self.width = model.latent or model.hidden
        self.router()
        if model.latent:
            self.add("ffn_latent_down.weight", "F32", (model.latent, model.hidden))
            self.add("ffn_latent_up.weight", "F32", (model.hidden, model.latent))
        self.experts()
        if model.shared_inner:
            self.mlp("shexp", model.shared_types, model.shared_inner)
            if model.shared_mode == "sigmoid":
                self.add("ffn_gate_inp_shexp.weight", "F32", (model.hidden,))
        if model.residual:
            for name in ("gate", "up", "down"):
                self.add(f"ffn_{name}.weight", model.residual, (model.hidden, model.hidden))

    def add(self, name, type_name, shape, spread=0.1) -> np.ndarray:
        weights = make(type_name, shape, self.rng, spread)
        self.tensors[name] = weights
        return weights.values

    def of(self, name) -> np.ndarray:
        return self.tensors[name].values

    def router(self):
        m = self.model
        self.add("ffn_gate_inp.weight", "F32", (m.experts, m.hidden), 0.3)
        if m.router_bias:
            self.add("ffn_gate_inp.bias", "F32", (m.experts,), 0.5)
        if m.selection_bias:
            self.add(m.selection_bias, "F32", (m.experts,), 0.2)
        if m.gemma:
            self.add("ffn_gate_inp.scale", "F32", (m.hidden,), 1.0)
            self.add("ffn_down_exps.scale", "F32", (m.experts,), 1.0)
        if m.hash_vocabulary:
            table = np.stack(
                [self.rng.permutation(m.experts)[: m.top_k] for _ in range(m.hash_vocabulary)]
            ).astype(np.int32)
            self.tensors["ffn_gate_tid2eid.weight"] = Weights(Type.I32, table, table)

    def experts(self):
        m = self.model
        gate, up, down = m.types
        shapes = {
            "gate": (gate, (m.experts, m.inner, self.width)),
            "up": (up, (m.experts, m.inner, self.width)),
            "down": (down, (m.experts, self.width, m.inner)),
        }
        if not m.gated:
            del shapes["gate"]
        if m.fused:
            fused = (m.experts, 2 * m.inner, self.width)
            self.add("ffn_gate_up_exps.weight", gate, fused)
            del shapes["gate"], shapes["up"]
        for name, (type_name, shape) in shapes.items():
            if m.per_expert:
                for e in range(m.experts):
                    self.add(f"ffn_{name}.{e}.weight", type_name, shape[1:])
                continue
            self.add(f"ffn_{name}_exps.weight", type_name, shape)
            if m.biases:
                self.add(f"ffn_{name}_exps.bias", "F32", shape[:2])
            if m.factors:
                self.add(f"ffn_{name}_exps.scale", "F32", (m.experts,), 1.0)

    def mlp(self, suffix, types, inner):
        hidden = self.model.hidden
        if self.model.gated:
            self.add(f"ffn_gate_{suffix}.weight", types[0], (inner, hidden))
        self.add(f"ffn_up_{suffix}.weight", types[1], (inner, hidden))
        self.add(f"ffn_down_{suffix}.weight", types[2], (hidden, inner))

    def matrix(self, name, expert):
        m = self.model
        if m.fused and name != "down":
            both = self.of("ffn_gate_up_exps.weight")[expert]
            return both[: m.inner] if name == "gate" else both[m.inner :]
        if m.per_expert:
            return self.of(f"ffn_{name}.{expert}.weight")
        return self.of(f"ffn_{name}_exps.weight")[expert]

    def product(self, name, expert, x):
        result = self.matrix(name, expert) @ x
        if self.model.factors:
            result = result * self.of(f"ffn_{name}_exps.scale")[expert]
        if self.model.biases:
            result = result + self.of(f"ffn_{name}_exps.bias")[expert]
        return result

    def limit(self, which):
        return self.model.limits[which] if self.model.limits else 0

    def expert(self, expert, x):
        gate = self.product("gate", expert, x) if self.model.gated else None
        inner = activate(self.model, gate, self.product("up", expert, x), self.limit(0))
        return self.product("down", expert, inner)

    def dense(self, suffix, x):
        dot = "." if not suffix else f"_{suffix}."
        gate = self.of(f"ffn_gate{dot}weight") @ x if self.model.gated else None
        inner = activate(self.model, gate, self.of(f"ffn_up{dot}weight") @ x, self.limit(1))
        return self.of(f"ffn_down{dot}weight") @ inner

    def route(self, x, token):
        m = self.model
        seen = x
        if m.gemma:
            seen = x / np.sqrt(np.mean(x * x) + 1e-6) * self.of("ffn_gate_inp.scale")
            seen = seen / np.sqrt(m.hidden)
        logits = self.of("ffn_gate_inp.weight") @ seen
        if m.router_bias:
            logits = logits + self.of("ffn_gate_inp.bias")
        scores = {
            "softmax": softmax,
            "sigmoid": sigmoid,
            "softplus": lambda v: np.sqrt(np.log1p(np.exp(v))),
            "chosen": lambda v: v,
        }[m.score](logits)
        if m.hash_vocabulary:
            ids = self.of("ffn_gate_tid2eid.weight")[token]
        else:
            ids = self.choose(logits if m.chooses_logits else scores)
        weights = softmax(scores[ids]) if m.score == "chosen" else scores[ids]
        if m.renormalize:
            weights = weights / max(weights.sum(), LEAST_SUM)
        if m.scale:
            weights = weights * np.float64(np.float32(m.scale))
        if m.gemma:
            weights = weights * self.of("ffn_down_exps.scale")[ids]
        return ids, weights

    def choose(self, scores):
        m = self.model
        if m.selection_bias:
            scores = scores + self.of(m.selection_bias)
        if m.groups:
            groups, kept = m.groups
            grouped = scores.reshape(groups, -1)
            best = np.sort(grouped, -1)[:, -2:].sum(-1)
            dropped = np.argsort(-best, kind="stable")[kept:]
            grouped = grouped.copy()
            grouped[dropped] = -np.inf
            scores = grouped.reshape(-1)
        return np.argsort(-scores, kind="stable")[: m.top_k]

    def output(self, x, token):
        m = self.model
        ids, weights = self.route(x, token)
        rows = self.of("ffn_latent_down.weight") @ x if m.latent else x
        total = np.zeros(self.width)
        for e, w in zip(ids, weights, strict=True):
            total += self.expert(e, w * rows) if m.weight_on_input else w * self.expert(e, rows)
        if m.latent:
            total = self.of("ffn_latent_up.weight") @ total
        if m.shared_inner:
            shared = self.dense("shexp", x)
            if m.shared_mode == "sigmoid":
                shared = shared * sigmoid(self.of("ffn_gate_inp_shexp.weight") @ x)
            total = total + shared
            if m.shared_mode == "average":
                total = total / 2
        if m.residual:
            total = total + self.dense("", x)
        return ids, total


def write_model(model: Model, folder: pathlib.Path, rng) -> None:
    layers = [Layer(model, index, rng) for index in model.layers]
    writers = [gguf.GGUFWriter(path, model.arch) for path in paths_of(model, folder)]
    head = writers[0]
    if model.alignment != 32:
        for writer in writers:
            writer.add_custom_alignment(model.alignment)
    write_keys(model, head)
    number = 0
    for layer in layers:
        for name, weights in layer.tensors.items():
            writer = writers[number % len(writers)]
            number += 1
            raw_type = None if weights.type in (Type.F32, Type.F16, Type.I32) else weights.type
            writer.add_tensor(f"blk.{layer.index}.{name}", weights.raw, raw_dtype=raw_type)
        norm = np.ones(model.hidden, np.float32)
        writers[-1].add_tensor(f"blk.{layer.index}.ffn_norm.weight", norm)
    if model.parts > 1:
        for part, writer in enumerate(writers):
            writer.add_uint16("split.no", part)
            writer.add_uint16("split.count", model.parts)
            writer.add_int32("split.tensors.count", number + len(layers))
    for writer in writers:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    write_reference(layers, folder, rng)


def paths_of(model: Model, folder: pathlib.Path) -> list[pathlib.Path]:
    if model.parts == 1:
        return [folder / "model.gguf"]
    count = model.parts
    return [folder / f"model-{part + 1:05}-of-{count:05}.gguf" for part in range(count)]


def write_keys(model: Model, writer) -> None:
    arch = model.arch
    writer.add_uint32(f"{arch}.block_count", model.block_count)
    writer.add_uint32(f"{arch}.embedding_length", model.hidden)
    writer.add_uint32(f"{arch}.expert_count", model.experts)
    writer.add_uint32(f"{arch}.expert_used_count", model.top_k)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    if model.gating_key is not None:
        writer.add_uint32(f"{arch}.expert_gating_func", model.gating_key)
    if model.scale is not None:
        writer.add_float32(f"{arch}.expert_weights_scale", model.scale)
    if model.groups:
        writer.add_uint32(f"{arch}.expert_group_count", model.groups[0])
        writer.add_uint32(f"{arch}.expert_group_used_count", model.groups[1])
    for key, value in model.keys.items():
        name = f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)


def write_reference(layers: list[Layer], folder: pathlib.Path, rng) -> None:
    tensors = {}
    for layer in layers:
        # Values of bf16, so that kernels which compute in it read the rows unchanged.
        hidden = rng.standard_normal((TOKENS, layer.model.hidden)).astype(np.float32)
        hidden = (hidden.view(np.uint32) & 0xFFFF0000).view(np.float32)
        tokens = rng.integers(0, max(layer.model.hash_vocabulary, 1), TOKENS).astype(np.int32)
        inputs = zip(hidden.astype(np.float64), tokens, strict=True)
        results = [layer.output(*each) for each in inputs]
        prefix = f"layers.{layer.index}."
        tensors[prefix + "hidden"] = hidden
        tensors[prefix + "topk_ids"] = np.stack([ids for ids, _ in results]).astype(np.int32)
        tensors[prefix + "output"] = np.stack([out for _, out in results])
        if layer.model.hash_vocabulary:
            tensors[prefix + "token_ids"] = tokens
    version = importlib.metadata.version("gguf")
    save_file(
        tensors,
        folder / "reference.safetensors",
        metadata={"provenance": f"gguf {version}, numpy {np.__version__}"},
    )


BY_KEY = {"expert_weights_norm": True}
MODELS = [
    Model("llama-q4_0", "llama", types=("Q4_0",) * 3, inner=96),
    Model("llama-old", "llama", types=("Q4_0", "Q5_0", "Q8_0"), per_expert=True, experts=5),
    Model("llama-split", "llama", parts=3, alignment=64, layers=(0, 1), block_count=2),
    Model("llama-tq", "llama", hidden=256, inner=256, experts=3, types=("TQ1_0", "TQ2_0", "TQ2_0")),
    Model("qwen3moe-iq4", "qwen3moe", hidden=256, inner=256, experts=4, top_k=3,
          types=("IQ4_XS", "IQ4_XS", "Q6_K")),
    Model("qwen3moe-q4_k_m", "qwen3moe", hidden=256, inner=256, experts=4,
          types=("Q4_K", "Q4_K", "Q6_K")),
    Model("qwen3moe-nvfp4", "qwen3moe", types=("NVFP4",) * 3, inner=64, factors=True),
    Model("qwen2moe-f16", "qwen2moe", types=("F16",) * 3, renormalize=False, inner=40,
          shared_inner=56, shared_types=("BF16",) * 3, shared_mode="sigmoid"),
    Model("deepseek2-q5_0", "deepseek2", experts=16, top_k=4, types=("Q5_0",) * 3, fused=True,
          score="sigmoid", gating_key=2, scale=2.5, groups=(4, 2), shared_inner=64,
          selection_bias="exp_probs_b.bias", shared_types=("Q8_0", "Q8_0", "Q5_0"),
          layers=(1, 2), block_count=3,
          keys={**BY_KEY, "leading_dense_block_count": 1, "expert_shared_count": 2}),
    Model("deepseek2-greedy", "deepseek2", types=("BF16",) * 3, renormalize=False, scale=1.0,
          inner=48, shared_inner=48, shared_types=("BF16",) * 3),
    Model("gpt-oss-mxfp4", "gpt-oss", types=("MXFP4",) * 3, score="chosen", renormalize=False,
          router_bias=True, biases=True, activation="oai", chooses_logits=True, top_k=4, inner=96),
    Model("llama4-bf16", "llama4", types=("BF16",) * 3, score="sigmoid", renormalize=False, top_k=1,
          chooses_logits=True, weight_on_input=True, shared_inner=32, shared_types=("BF16",) * 3),
    Model("nemotron-latent", "nemotron_h_moe", score="sigmoid", scale=2.5, activation="relu2",
          gated=False, latent=32, inner=64, selection_bias="exp_probs_b.bias", shared_inner=96,
          shared_types=("Q8_0",) * 3, keys=BY_KEY),
    Model("glm4moe-q4_1", "glm4moe", score="sigmoid", scale=1.5, selection_bias="exp_probs_b.bias",
          types=("Q4_1", "Q5_1", "Q4_1"), shared_inner=32, shared_types=("Q8_0",) * 3, keys=BY_KEY),
    Model("step35-clamped", "step35", score="sigmoid", selection_bias="exp_probs_b.bias",
          shared_inner=32, limits=(0.05, 0.1), layers=(1,), block_count=2,
          keys={**BY_KEY, "swiglu_clamp_exp": [0.0, 0.05], "swiglu_clamp_shexp": [0.0, 0.1]}),
    Model("hy_v3-iq", "hy_v3", hidden=256, inner=256, experts=3, score="sigmoid",
          types=("IQ2_XXS", "IQ3_S", "IQ1_S"), selection_bias="exp_probs_b", keys=BY_KEY),
    Model("deepseek4-hash", "deepseek4", score="softplus", gating_key=4, scale=1.5,
          types=("MXFP4",) * 3, activation="before", limits=(0.2, 0.3), hash_vocabulary=29,
          shared_inner=32,
          keys={**BY_KEY, "swiglu_clamp_exp": 0.2, "swiglu_clamp_shexp": 0.3,
                "hash_layer_count": 1}),
    Model("gemma4-q8_0", "gemma4", gemma=True, activation="gelu", fused=True,
          keys={"attention.layer_norm_rms_epsilon": 1e-6}),
    Model("arctic-q8_0", "arctic", residual="Q8_0"),
    Model("cohere2moe-average", "cohere2moe", score="sigmoid", shared_inner=32,
          shared_mode="average", keys={**BY_KEY, "leading_dense_block_count": 0}),
    Model("olmoe-iq4_nl", "olmoe", hidden=128, inner=128, types=("IQ4_NL", "IQ4_NL", "Q5_0"),
          renormalize=False),
    Model("minimax-m2-iq3", "minimax-m2", hidden=256, inner=256, experts=3, score="sigmoid",
          gating_key=2, types=("IQ3_XXS", "IQ2_S", "Q3_K"), selection_bias="exp_probs_b.bias"),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default="testdata/gguf")
    parser.add_argument("--only", default="", help="write models whose name contains this")
    options = parser.parse_args()
    for number, model in enumerate(MODELS):
        if options.only not in model.name:
            continue
        folder = options.out / model.name
        folder.mkdir(parents=True, exist_ok=True)
        write_model(model, folder, np.random.default_rng(1000 + number))
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{folder}: {model.arch}, {size >> 10} KiB")


if __name__ == "__main__":
    main()
