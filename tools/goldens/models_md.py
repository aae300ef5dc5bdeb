"""docs/models.md from the families' facts and the errors recorded in their goldens."""

import pathlib
from collections.abc import Iterable

from goldens.build import read_provenance
from goldens.family import Family

HEAD = """# Model families

One row per model type that has a golden checkpoint below `testdata/models/`. The table is written by
`python3 tools/make_goldens.py --models-md` from the families' facts: change those, not this page.

E experts, k experts per token, H hidden size, I intermediate size of an expert, N layer number. Tensor
names are those on disk, `e` an expert's number. The last two columns give the worst per-token relative
L2 distance of the maker's own block output from float64 in a run with float32 and with bfloat16
weights and activations. All of them run on the CPU and on NVIDIA Hopper GPUs: `tests/conformance/families_test.cc` and
`tests/layer/cuda/families_test.cc` hold both to the same bars.

| model type | E / k / I fields | MoE layers | router | tensors | quirks | golden | made by | f32 | bf16 |
|---|---|---|---|---|---|---|---|---|---|
"""

TAIL = """
## Not covered

Model types of transformers 5.23 whose blocks `MoeSpec` does not describe: `zaya` (the router is an MLP
with state from the layer before), `muse_spark` (an RMS norm of each expert's output), `switch_transformers`
and `nllb_moe` (experts with a capacity that drops tokens), `doge` (product keys). Of covered types: the
talker of `qwen3_omni_moe` and the vision experts of `dots3_note`. Goldens do not cover MTP layers.
"""


def page(families: Iterable[Family], models: pathlib.Path) -> str:
    """One row per model type; its variants share the first one's facts."""
    by_type: dict[str, list[Family]] = {}
    for family in families:
        if (models / family.name).is_dir():
            by_type.setdefault(family.model_type, []).append(family)
    return HEAD + "".join(row(by_type[model_type], models) for model_type in sorted(by_type)) + TAIL


def row(variants: list[Family], models: pathlib.Path) -> str:
    worst = {"f32": 0.0, "bf16": 0.0}
    made_by = set()
    for family in variants:
        provenance = read_provenance(models / family.name)
        made_by.add(provenance["made_by"])
        for key, error in provenance[f"{provenance['made_by']}_error"].items():
            run = key.rpartition(".")[2]
            worst[run] = max(worst[run], float(error))
    facts = variants[0].facts
    cells = [
        f"`{variants[0].model_type}`", facts.fields, facts.layer_rule, facts.router, facts.names, facts.quirks,
        ", ".join(f"`{family.name}`" for family in variants), ", ".join(sorted(made_by)),
        f"{worst['f32']:.1e}", f"{worst['bf16']:.1e}",
    ]
    if any("|" in cell for cell in cells):
        raise SystemExit(f"{variants[0].name}: a fact contains a pipe")
    return "| " + " | ".join(cell or "-" for cell in cells) + " |\n"
