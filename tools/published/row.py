"""A row of the table: configurations of one family, and the layers that they describe."""

import dataclasses
from collections.abc import Callable

import transformers

from published.source import config_class

HIDDEN, INNER, EXPERTS, LAYERS = 960, 48, 16, 8


@dataclasses.dataclass
class Row:
    """What stands for one table of the library. `spec` and `layers` see transformers' configuration."""

    types: list[str]  # model types with this table, the first stands for all
    read_as: str | None  # the type whose configuration class reads it; None: values by hand
    source: str  # the file that the values by hand stand in
    config: dict  # the keys without which there is no model
    other: dict  # every optional key, none at its default
    spec: Callable
    layers: Callable
    wrapped: list[str] = dataclasses.field(default_factory=list)  # types with all of it in "text_config"
    vision: dict | None = None  # what differs in the experts for images, where there are any
    special: Callable | None = None  # layers with fields of their own: what differs, by their number


def sizes(experts="num_experts", top_k="num_experts_per_tok", inner="moe_intermediate_size", **more) -> dict:
    return {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        experts: EXPERTS,
        top_k: 2,
        inner: INNER,
        **more,
    }


def record(row: Row) -> dict:
    """The row as the test reads it."""
    cases = []
    for name, config in (("stripped", row.config), ("other", {**row.config, **row.other})):
        if name == "other" and not row.other:
            continue
        seen = config if row.read_as is None else config_class(row.read_as)(**config)
        layers = row.layers(seen)
        case = {"name": name, "config": config, "layers": layers, "spec": row.spec(seen)}
        if row.special:
            case["layer_specs"] = row.special(seen)
        cases.append(case)
    head = {"vision": row.vision} if row.vision else {}
    by = f"transformers {transformers.__version__}, {config_class(row.read_as).__name__}" if row.read_as else "by hand"
    return {"types": row.types, "wrapped": row.wrapped, "by": by, "source": row.source, **head, "cases": cases}
