"""What the installed transformers says: its configuration classes, and constants in its modeling code."""

import functools
import pathlib
import re

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MODELS = pathlib.Path(transformers.__file__).parent / "models"


@functools.cache
def modeling(folder: str) -> str:
    """The text of a family's modeling file."""
    (path,) = (MODELS / folder).glob("modeling_*.py")
    return path.read_text()


def config_class(model_type: str):
    return CONFIG_MAPPING[model_type]


def says(folder: str, pattern: str) -> bool:
    """Stops where the modeling file does not hold what a value of the table stands for."""
    if not re.search(pattern, modeling(folder)):
        raise SystemExit(f"{folder}: the modeling code no longer says {pattern!r}")
    return True


def epsilon(folder: str) -> float:
    """What is added to the sum of the chosen weights; 0 where the code divides by the bare sum."""
    found = set(re.findall(r"\.sum\(dim=-1, keepdim=True\) \+ ([0-9.e-]+)", modeling(folder)))
    if len(found) > 1:
        raise SystemExit(f"{folder}: several epsilons: {found}")
    return float(found.pop()) if found else 0.0


# The first that the modeling file holds decides what the router's product is computed in.
PRODUCTS = (
    (r"self\.wg\.weight\.dtype == torch\.float32", "stored"),
    (r"F\.linear\(hidden_states\.to\(self\.weight\.dtype\), self\.weight\)", "stored"),
    (r"F\.linear\(\s*hidden_states\.(type\(torch\.float32\)|float\(\)), self\.(classifier\.)?weight", "f32"),
    (r"F\.linear\(flat\.float\(\), self\.weight\.float\(\)\)", "f32"),
    (r"hidden_states = hidden_states\.float\(\)\n\s+flat = .*\n\s+logits = F\.linear\(flat, self\.weight\)", "f32"),
    (r"(F|nn\.functional)\.linear\((hidden_states|flat), self\.weight(, self\.bias)?\)", "model"),
    (r"self\.(layer|gate|router|proj)\((hidden_states|hidden_states_reshaped|expert_input)\)", "model"),
    (r"router_logits = super\(\)\.forward\(hidden_states\)", "model"),
)


def product(folder: str) -> str:
    """ "f32", "model" (the type of the activations) or "stored" (that of the router's matrix)."""
    for pattern, kind in PRODUCTS:
        if re.search(pattern, modeling(folder)):
            return kind
    raise SystemExit(f"{folder}: no known router product")
