"""Tiny models of transformers from testdata/models, run eagerly and through the library."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import torch
import transformers

try:
    from huggingface_hub.errors import StrictDataclassError as _Invalid
except ImportError:  # a version that checks fields by other means
    _Invalid = ValueError  # type: ignore[misc,assignment]

ROOT = pathlib.Path(__file__).resolve().parents[3]
MODELS = ROOT / "testdata" / "models"
# The version that testdata was made with, in which every block is as the library knows it. In older
# ones some families have other formulas; there results must be equal, by whatever way.
IS_NEWEST = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 20)
NEW_TOKENS = 16
PROMPT = (2, 9)

# Other classes than the folder's config.json names, where that one takes no text by itself.
_PARTS = {"qwen3_omni_moe": "thinker"}
# Folders whose class of that name in transformers is another model.
_NAMESAKES = ("phixtral", "phixtral-inner")


def _clip_qkv(config: Any) -> None:
    config.attn_config.clip_qkv = 8.0  # the published value; without one the class does not run


def _window(config: Any) -> None:
    config.get_text_config().sliding_window = 16


def _pad(config: Any) -> None:
    config.get_text_config().pad_token_id = 0


_TWEAKS = {
    "dbrx": _clip_qkv,
    "dbrx-unnormalised": _clip_qkv,
    "gemma4": _pad,
    "step3p7": _window,
}


class NoClass(LookupError):
    """This version of transformers does not have the model's class."""


def folders() -> list[str]:
    return sorted(p.parent.name for p in MODELS.glob("*/config.json"))


def config_of(name: str) -> tuple[Any, Any]:
    """The class of a model and its configuration. Raises NoClass."""
    directory = MODELS / name
    fields = json.loads((directory / "config.json").read_text())
    architecture = (fields.get("architectures") or [""])[0]
    cls = getattr(transformers, architecture, None)
    if cls is None or name in _NAMESAKES:
        raise NoClass(architecture or "no architecture is named")
    try:
        return cls, cls.config_class.from_pretrained(directory)
    except (AttributeError, ValueError, KeyError, TypeError, _Invalid) as error:  # a newer one's
        raise NoClass(f"{architecture} of this version cannot read the configuration") from error


def load(name: str, dtype: torch.dtype = torch.float32, experts: str = "eager") -> Any:
    """A model with the weights of testdata. Raises NoClass."""
    cls, config = config_of(name)
    _TWEAKS.get(name, lambda config: None)(config)
    device = torch.get_default_device()
    torch.set_default_device("cpu")  # buffers that a model computes: the same on every device
    try:
        model, info = cls.from_pretrained(
            MODELS / name,
            config=config,
            dtype=dtype,
            experts_implementation=experts,
            attn_implementation="eager",
            output_loading_info=True,
        )
    except (RuntimeError, AttributeError) as error:  # other shapes than this version has
        raise NoClass(f"{cls.__name__} of this version cannot load the weights") from error
    finally:
        torch.set_default_device(device)
    if info["missing_keys"]:
        raise NoClass(f"{cls.__name__} of this version does not find {min(info['missing_keys'])}")
    model = model.to(device).eval()
    return getattr(model, _PARTS[name]) if name in _PARTS else model


@dataclasses.dataclass
class Run:
    """Logits of the prompt, and of every greedy step with the tokens chosen."""

    prefill: torch.Tensor  # [B, T, V]
    steps: list[torch.Tensor]  # [B, V] each
    tokens: list[list[int]]  # [steps][B]


def dispatches(model: Any) -> bool:
    """Whether a model's experts have a forward that transformers exchanges."""
    wrapped = (hasattr(type(module).forward, "__wrapped__") for module in model.modules())
    held = (hasattr(module, "down_proj") for module in model.modules())
    stacked = (
        getattr(getattr(module, "down_proj", None), "ndim", 0) == 3 for module in model.modules()
    )
    return any(all(traits) for traits in zip(wrapped, held, stacked, strict=True))


def _logits(out: Any) -> torch.Tensor:
    return getattr(out, "logits", None) if hasattr(out, "logits") else out[0]


def prompt(seed: int = 1) -> torch.Tensor:
    numbers = torch.Generator("cpu").manual_seed(seed)
    ids = torch.randint(1, 60, PROMPT, generator=numbers, device="cpu")
    return ids.to(torch.get_default_device())


def _forward(model: Any, ids: torch.Tensor, **kwargs: Any) -> Any:
    torch.manual_seed(11)  # a model may draw numbers
    return model(input_ids=ids, **kwargs)


def run(model: Any, ids: torch.Tensor, new_tokens: int = NEW_TOKENS) -> Run:
    """Prefill and greedy decode, with the cache where the model has one for these layers."""
    with torch.no_grad():
        try:
            out = _forward(model, ids, use_cache=True)
            cache = getattr(out, "past_key_values", None)
        except (ValueError, TypeError):
            out, cache = _forward(model, ids, use_cache=False), None
        logits = _logits(out)
        result = Run(logits.float(), [], [])
        if logits.shape[1] != ids.shape[1] or "ForTokenClassification" in type(model).__name__:
            return result  # not a model that continues its prompt
        for _ in range(new_tokens):
            token = logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, token], dim=1)
            if cache is not None:
                out = _forward(model, token, past_key_values=cache, use_cache=True)
            else:
                out = _forward(model, ids, use_cache=False)
            logits = _logits(out)
            result.steps.append(logits[:, -1].float())
            result.tokens.append(token.flatten().tolist())
    return result


def worst_difference(actual: Run, expected: Run) -> float:
    """The largest relative L2 distance of a token's logits, prefill and decode."""
    pairs = [(actual.prefill, expected.prefill)]
    pairs += list(zip(actual.steps, expected.steps, strict=True))
    return max(
        float(((a - e).norm(dim=-1) / e.norm(dim=-1).clamp(min=1e-30)).max()) for a, e in pairs
    )
