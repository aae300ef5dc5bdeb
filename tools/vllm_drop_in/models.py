"""Model files of a vLLM tree against transformers: the same tiny checkpoint, the same logits."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import pathlib
import tempfile
import traceback
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

BAR = 1e-4  # relative, of float32 logits behind some layers


@dataclasses.dataclass(frozen=True)
class Model:
    """One architecture: where its file is, and a small configuration."""

    file: str
    name: str
    config: str
    sizes: dict[str, Any]


_SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_MLA = {
    "num_key_value_heads": 4,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": False,
}
MODELS = (
    Model(
        "mixtral",
        "MixtralForCausalLM",
        "MixtralConfig",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40,
         "sliding_window": None},
    ),
    Model(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
         "intermediate_size": 40, "norm_topk_prob": True, "decoder_sparse_step": 1, "head_dim": 16,
         "mlp_only_layers": []},
    ),
    Model(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {**_MLA, "topk_method": "group_limited_greedy"},
    ),
    Model(
        "deepseek_v2",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**_MLA, "q_lora_rank": 24, "topk_group": 2, "norm_topk_prob": True,
         "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    Model(
        "gpt_oss",
        "GptOssForCausalLM",
        "GptOssConfig",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40, "head_dim": 16,
         "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
)  # fmt: skip


def compare(model: Model) -> str:
    """The relative distance of the logits as text, or what went wrong."""
    try:
        return _distance(model)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{pathlib.Path(last.filename).name}:{last.lineno}"
        return f"failed: {type(error).__name__} at {place}: {error}"


def _distance(model: Model) -> str:
    torch.manual_seed(5)
    config = getattr(transformers, model.config)(**{**_SMALL, **model.sizes})
    config._attn_implementation = "eager"
    theirs = getattr(transformers, model.name)(config).eval().float()
    for name, param in theirs.named_parameters():
        if param.ndim > 1 or "bias" in name or "sinks" in name:
            torch.nn.init.normal_(param, std=0.2)
    for name, buffer in theirs.named_buffers():
        if "e_score_correction_bias" in name:
            torch.nn.init.normal_(buffer, std=0.2)
    ids = torch.randint(0, config.vocab_size, (1, 11))
    with torch.no_grad():
        wanted = theirs(ids).logits[0]
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        tensors = {}
        for file in sorted(pathlib.Path(folder).glob("*.safetensors")):
            tensors |= load_file(file)
    found = _logits(model, config, tensors, ids[0])
    gc.collect()
    distance = float((found - wanted).norm() / wanted.norm())
    return f"{distance:.1e}" if distance <= BAR else f"failed: logits {distance:.1e} apart"


def _logits(
    model: Model, config: Any, tensors: dict[str, torch.Tensor], ids: torch.Tensor
) -> torch.Tensor:
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config

    engine = VllmConfig(model_config=ModelConfig(torch.float32, config))
    engine.model_config.use_mla = False
    with set_current_vllm_config(engine), torch.inference_mode():
        file = importlib.import_module(f"vllm.model_executor.models.{model.file}")
        made = getattr(file, model.name)(vllm_config=engine).eval()
        loaded = made.load_weights(iter(tensors.items()))
        missing = {name for name, _ in made.named_parameters()} - set(loaded)
        if missing:
            raise ValueError(f"parameters that took no tensor: {sorted(missing)[:4]}")
        hidden = made(ids, torch.arange(len(ids)))
        return made.compute_logits(hidden)
