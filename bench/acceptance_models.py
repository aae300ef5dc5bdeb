#!/usr/bin/env python3
"""Writes random models of released sizes and quantisations, of two layers each, to try readers on.

  gpt-oss       gpt-oss-20b: mxfp4 stacks under the released names, biases, bf16 router
  gguf          Mixtral 8x7B as a "Q4_K_M" file: gate and up Q4_K, down Q6_K and Q4_K
  gptq          Qwen3-30B-A3B: int4 in groups of 128, columns in the order of act-order

Usage: bench/acceptance_models.py OUT_DIR [NAME ...]. Only what MoE layers read is written.
Needs numpy, and gguf for the GGUF file.
"""

import json
import pathlib
import sys

import numpy as np

LAYERS = 2


def rng_of(*key: int) -> np.random.Generator:
    return np.random.default_rng([20261123, *key])


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Bits of bf16; the lower half is cut off, since any values will do."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def write_safetensors(path: pathlib.Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """numpy has no bf16, so that the header is made here."""
    header, offset = {}, 0
    for name, (dtype, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(data.shape),
            "data_offsets": [offset, offset + data.nbytes],
        }
        offset += data.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, data in tensors.values():
            data.tofile(file)


def write_config(directory: pathlib.Path, **config: object) -> None:
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def gpt_oss(directory: pathlib.Path) -> None:
    experts, hidden, inner = 32, 2880, 2880
    tensors = {}
    for layer in range(LAYERS):
        rng = rng_of(1, layer)
        prefix = f"model.layers.{layer}.mlp."
        for name, rows, cols in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            stack = f"{prefix}experts.{name}"
            shape = (experts, rows, cols // 32)
            blocks = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
            tensors[f"{stack}_blocks"] = ("U8", blocks)
            tensors[f"{stack}_scales"] = ("U8", rng.integers(118, 122, shape, dtype=np.uint8))
            bias = 0.1 * rng.standard_normal((experts, rows))
            tensors[f"{stack}_bias"] = ("BF16", to_bf16(bias))
        router = rng.standard_normal((experts, hidden)) / np.sqrt(hidden)
        tensors[f"{prefix}router.weight"] = ("BF16", to_bf16(router))
        tensors[f"{prefix}router.bias"] = ("BF16", to_bf16(rng.standard_normal(experts)))
    write_safetensors(directory / "model.safetensors", tensors)
    write_config(
        directory,
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        hidden_size=hidden,
        intermediate_size=inner,
        num_local_experts=experts,
        num_experts_per_tok=4,
        experts_per_token=4,
        num_hidden_layers=LAYERS,
        hidden_act="silu",
        swiglu_limit=7.0,
        quantization_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        },
    )


def random_blocks(type_name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Valid blocks of K types: random codes and group scales, ordinary float16 scales."""
    import gguf

    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    halves, spread = {"Q4_K": ((0, 2), 1e-4), "Q6_K": ((208,), 1e-5)}[type_name]
    count = int(np.prod(shape)) // elements
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for at in halves:
        scales = (spread * rng.uniform(0.5, 1.5, count)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*shape[:-1], shape[-1] // elements * size)


def gguf_model(directory: pathlib.Path) -> None:
    import gguf

    experts, hidden, inner = 8, 4096, 14336
    writer = gguf.GGUFWriter(directory / "model.gguf", "llama")
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(2)
    writer.add_file_type(15)  # "mostly Q4_K, medium"
    for layer in range(LAYERS):
        rng = rng_of(2, layer)
        prefix = f"blk.{layer}.ffn_"
        router = rng.standard_normal((experts, hidden)).astype(np.float32) / np.sqrt(hidden)
        writer.add_tensor(f"{prefix}gate_inp.weight", router.astype(np.float32))
        # llama.cpp gives the down matrices of about half of the layers more bits.
        for name, type_name, shape in (
            ("gate", "Q4_K", (experts, inner, hidden)),
            ("up", "Q4_K", (experts, inner, hidden)),
            ("down", "Q6_K" if layer == 0 else "Q4_K", (experts, hidden, inner)),
        ):
            writer.add_tensor(
                f"{prefix}{name}_exps.weight",
                random_blocks(type_name, shape, rng),
                raw_dtype=gguf.GGMLQuantizationType[type_name],
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gptq(directory: pathlib.Path) -> None:
    experts, hidden, inner, group = 128, 2048, 768, 128
    tensors = {}
    for layer in range(LAYERS):
        rng = rng_of(3, layer)
        prefix = f"model.layers.{layer}.mlp."
        for expert in range(experts):
            for name, rows, cols in (
                ("gate_proj", inner, hidden),
                ("up_proj", inner, hidden),
                ("down_proj", hidden, inner),
            ):
                key = f"{prefix}experts.{expert}.{name}."
                words = rng.integers(-(2**31), 2**31, (cols // 8, rows), dtype=np.int64)
                tensors[key + "qweight"] = ("I32", words.astype(np.int32))
                # The first format stores the middle, 8, less one.
                zeros = np.full((cols // group, rows // 8), 0x77777777, np.int32)
                tensors[key + "qzeros"] = ("I32", zeros)
                scales = rng.uniform(0.5, 1.5, (cols // group, rows)) * 0.15 / np.sqrt(cols)
                tensors[key + "scales"] = ("F16", scales.astype(np.float16))
                order = rng.permutation(np.arange(cols) // group).astype(np.int32)
                tensors[key + "g_idx"] = ("I32", order)
        router = rng.standard_normal((experts, hidden)) / np.sqrt(hidden)
        tensors[f"{prefix}gate.weight"] = ("BF16", to_bf16(router))
    write_safetensors(directory / "model.safetensors", tensors)
    write_config(
        directory,
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        hidden_size=hidden,
        moe_intermediate_size=inner,
        intermediate_size=6144,
        num_experts=experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_hidden_layers=LAYERS,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        hidden_act="silu",
        quantization_config={
            "quant_method": "gptq",
            "bits": 4,
            "group_size": group,
            "desc_act": True,
            "sym": True,
            "checkpoint_format": "gptq",
        },
    )


MODELS = {"gpt-oss": gpt_oss, "gguf": gguf_model, "gptq": gptq}


def main(arguments: list[str]) -> None:
    if not arguments or set(arguments[1:]) - set(MODELS):
        raise SystemExit(__doc__)
    for name in arguments[1:] or MODELS:
        directory = pathlib.Path(arguments[0]) / name
        directory.mkdir(parents=True, exist_ok=True)
        MODELS[name](directory)
        print(directory)


if __name__ == "__main__":
    main(sys.argv[1:])
