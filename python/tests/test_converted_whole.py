"""Whole models converted to GGUF files and back: transformers' own GGUF loader, llama.cpp and
transformers on the directory that comes back generate the tokens of the model that went in."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from support import safetensors
from support.converted import convert, with_vocabulary

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")
gguf = pytest.importorskip("gguf", reason="gguf is not installed")

NEW_TOKENS = 16
PROMPT = [3, 17, 42, 5, 29, 11, 60, 8]
HEADS, HEAD_DIM, VOCAB = 4, 16, 64
# llama.cpp takes this token for the end where a file says nothing, and is told to ignore the end.
END_OF_TEXT = 11
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "num_key_value_heads": HEADS,
}
FEW = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": True,
}

# By name: the class's prefix and what its configuration states beside the common sizes. Where
# transformers' loader takes a size from its own default, that is the size here.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", FEW),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 96,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 96,
            "moe_intermediate_size": 768,
            "head_dim": HEAD_DIM,
            "norm_topk_prob": True,
        },
    ),
    "olmoe": (
        "Olmoe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 96,
            "num_key_value_heads": HEADS,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **ROUTED,
            **LATENT,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {**ROUTED, **LATENT, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **ROUTED,
            "head_dim": HEAD_DIM,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**ROUTED, **LATENT}),
    "granitemoe": (
        "GraniteMoe",
        {
            **FEW,
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.5,
        },
    ),
    "granitemoeshared": ("GraniteMoeShared", {**FEW, "shared_intermediate_size": 64}),
    "gpt_oss": ("GptOss", {**FEW, "head_dim": HEAD_DIM, "rope_parameters": YARN}),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        {"num_experts": 4, "moe_topk": 2, "intermediate_size": 96, "head_dim": HEAD_DIM},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 64,
            "intermediate_size": 96,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
            "num_hidden_layers": 3,
        },
    ),
    "minimax_m2": ("MiniMaxM2", {**FEW, "head_dim": HEAD_DIM, "rotary_dim": 8}),
    "dbrx": (
        "Dbrx",
        {
            "d_model": 64,
            "n_heads": HEADS,
            "n_layers": 2,
            "max_seq_len": 256,
            "attn_config": {"clip_qkv": 1.5, "kv_n_heads": 2, "rope_theta": 10000.0},
            "ffn_config": {
                "hidden_size": 64,
                "ffn_hidden_size": 96,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "moe_normalize_expert_weights": 1.0,
            },
        },
    ),
    "dots1": (
        "Dots1",
        {
            **ROUTED,
            "head_dim": HEAD_DIM,
            "first_k_dense_replace": 1,
            "num_key_value_heads": HEADS,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}
# transformers' loader has these architectures with their experts.
LOADED = ("qwen2_moe", "qwen3_moe", "minimax_m2")
# Published with experts in stacks that lie columns first, as no directory of values has them here.
STACKED = ("gpt_oss", "dbrx")


def make_model(name: str, directory: pathlib.Path, **more: Any) -> None:
    prefix, sizes = MODELS[name]
    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    common = {
        **({} if "d_model" in sizes else shape),
        "vocab_size": VOCAB,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.25,
    }
    torch.manual_seed(6)
    config = getattr(transformers, f"{prefix}Config")(**{**common, **sizes, **more})
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(torch.float32)
    noise = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=noise))
        for buffer_name, buffer in model.named_buffers():
            if "correction" in buffer_name:
                buffer.copy_(0.05 * torch.randn(buffer.shape, generator=noise))
    model.save_pretrained(directory)


def generate(model: Any) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([PROMPT]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    return out[0].tolist()


def logits(model: Any, tokens: list[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def load(directory: pathlib.Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, **options
    )


class Whole:
    """A model, the tokens that it generates, and its GGUF file of the same values."""

    def __init__(self, name: str, directory: pathlib.Path) -> None:
        self.directory = directory
        make_model(name, directory / "source")
        self.model = load(directory / "source")
        self.tokens = generate(self.model)
        assert len(set(self.tokens[len(PROMPT) :])) > 3, "a constant model would tell nothing"
        self.logits = logits(self.model, self.tokens)
        out = convert(directory / "source", directory / "file", "q8_0", keep="*=f32")
        self.file = out / "model.gguf"
        self.report = json.loads((out / "conversion.json").read_text())


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    return {name: Whole(name, tmp_path_factory.mktemp(name)) for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_has_the_name_of_gguf_pys_map(wholes: dict[str, Whole], name: str) -> None:
    whole = wholes[name]
    assert whole.report["incomplete"] == ""
    assert whole.report["tensors_left_out"] == []
    reader = gguf.GGUFReader(whole.file)
    architecture = reader.fields["general.architecture"].contents()
    known = next(key for key, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    layers = whole.model.config.num_hidden_layers
    names = gguf.get_tensor_name_map(known, layers)
    allowed = {
        gguf.TENSOR_NAMES[tensor].format(bid=layer)
        for tensor in gguf.MODEL_TENSORS[known]
        for layer in range(layers)
    }
    written = {tensor.name.rsplit(".", 1)[0] for tensor in reader.tensors}
    assert written <= allowed
    parts = {"kv_b_proj": ("attn_k_b", "attn_v_b")}
    for path in (whole.directory / "source").glob("*.safetensors"):
        for tensor in safetensors.read(path):
            if "experts" in tensor or "input_linear" in tensor or "output_linear" in tensor:
                continue
            stem = tensor.removesuffix(".weight").removesuffix(".bias")
            layer = next((part for part in stem.split(".") if part.isdigit()), None)
            wanted = parts.get(stem.rsplit(".", 1)[-1])
            if wanted:
                assert {f"blk.{layer}.{part}" for part in wanted} <= written
                continue
            found = names.get_name(stem.removesuffix("_bias"))
            assert found in written, f"{tensor} should be {found}"


@pytest.mark.parametrize("name", LOADED)
def test_transformers_own_loader_generates_the_same_tokens(
    wholes: dict[str, Whole], name: str
) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    whole = wholes[name]
    model = load(whole.file.parent, gguf_file=whole.file.name)
    assert generate(model) == whole.tokens
    torch.testing.assert_close(logits(model, whole.tokens), whole.logits)


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_gives_tokens_the_same_probabilities(wholes: dict[str, Whole], name: str) -> None:
    xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    whole = wholes[name]
    path = whole.directory / "with_vocabulary.gguf"
    with_vocabulary(whole.file, path, VOCAB)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx = 256
    parameters.n_parallel = 1
    parameters.warmup = False
    parameters.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    answer = xllamacpp.Server(parameters).handle_completions(
        {
            "prompt": PROMPT,
            "n_predict": NEW_TOKENS,
            "temperature": 0,
            "top_k": 1,
            "ignore_eos": True,
            "n_probs": 1,
            "cache_prompt": False,
        }
    )
    if not isinstance(answer, dict):
        answer = json.loads(answer)
    chosen = answer["choices"][0]["logprobs"]["content"]
    sequence = PROMPT + [token["id"] for token in chosen]
    expected = torch.log_softmax(logits(whole.model, sequence), -1)
    for at, token in enumerate(chosen, len(PROMPT) - 1):
        probability = expected[at, token["id"]].item()
        assert abs(probability - token["logprob"]) < 1e-4
        others = expected[at].clone()
        others[END_OF_TEXT] = -torch.inf
        assert others.max().item() - probability < 1e-4, "the server takes the likeliest token"


@pytest.mark.parametrize("name", [name for name in MODELS if name not in STACKED])
def test_the_directory_that_comes_back_generates_the_same_tokens(
    wholes: dict[str, Whole], name: str
) -> None:
    whole = wholes[name]
    back = convert(whole.file, whole.directory / "back", "f32")
    assert json.loads((back / "conversion.json").read_text())["incomplete"] == ""
    model = load(back)
    assert generate(model) == whole.tokens
    torch.testing.assert_close(logits(model, whole.tokens), whole.logits)


def test_gpt_oss_comes_back_as_it_is_released(
    wholes: dict[str, Whole], tmp_path: pathlib.Path
) -> None:
    """transformers decodes the stacks to gguf-py's values of the file; all else is rounded once."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    source = wholes["gpt_oss"].directory / "source"
    file = convert(source, tmp_path / "file.gguf", "mxfp4") / "model.gguf"
    model = load(convert(file, tmp_path / "back", "gpt-oss-mxfp4")).to(torch.float32)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    parameters = dict(model.named_parameters())

    def stored(name: str) -> Any:
        values = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        return torch.from_numpy(values)

    def equal(actual: Any, expected: Any) -> None:
        torch.testing.assert_close(actual, expected.to(torch.float32), rtol=0, atol=0)

    for layer in range(2):
        experts, file_experts = f"model.layers.{layer}.mlp.experts", f"blk.{layer}.ffn"
        for at, part in enumerate(("gate", "up")):
            stack = parameters[f"{experts}.gate_up_proj"][..., at::2]
            equal(stack, stored(f"{file_experts}_{part}_exps.weight").transpose(1, 2))
            bias = parameters[f"{experts}.gate_up_proj_bias"][..., at::2]
            equal(bias, stored(f"{file_experts}_{part}_exps.bias"))
        down = stored(f"{file_experts}_down_exps.weight").transpose(1, 2)
        equal(parameters[f"{experts}.down_proj"], down)
        sinks = stored(f"blk.{layer}.attn_sinks.weight").to(torch.bfloat16)
        equal(parameters[f"model.layers.{layer}.self_attn.sinks"], sinks)
    assert len(generate(model)) == len(PROMPT) + NEW_TOKENS


def test_blocks_beside_experts_become_values(
    wholes: dict[str, Whole], tmp_path: pathlib.Path
) -> None:
    """A file whose attention and embedding are blocks too, as gguf-py makes and reads them."""
    whole = wholes["mixtral"]
    reader = gguf.GGUFReader(whole.file)
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = {
        tensor.name: gguf.quants.quantize(tensor.data, kind)
        for tensor in reader.tensors
        if tensor.name.endswith(("attn_q.weight", "attn_output.weight", "token_embd.weight"))
    }
    path = tmp_path / "blocks.gguf"
    with_vocabulary(whole.file, path, VOCAB, {name: (data, kind) for name, data in blocks.items()})
    back = convert(path, tmp_path / "back", "bf16")
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"
    stored = safetensors.read(back / "model.safetensors")

    def rounded(name: str) -> Any:
        values = gguf.quants.dequantize(blocks[name], kind)
        return torch.from_numpy(values).to(torch.bfloat16).to(torch.float32)

    def written(name: str) -> Any:
        return torch.from_numpy(stored[name].astype("float32"))

    torch.testing.assert_close(
        written("model.embed_tokens.weight"), rounded("token_embd.weight"), rtol=0, atol=0
    )
    pairs = rounded("blk.1.attn_q.weight").reshape(HEADS, HEAD_DIM // 2, 2, -1)
    torch.testing.assert_close(
        written("model.layers.1.self_attn.q_proj.weight"),
        pairs.transpose(1, 2).reshape(HEADS * HEAD_DIM, -1),
        rtol=0,
        atol=0,
    )
