"""What a configuration says of a layer of experts by its name: whether it stays as it is, and which
module has the scheme of all its matrices."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from conclave import _conclave
from conclave.errors import ConclaveUnsupportedError, ConclaveValueError
from conclave.vllm._method_readers import as_text, kept_modules, refuse_unread
from conclave.vllm.mapping import Row

Members = tuple[str, ...]

# Names of an expert's matrices in checkpoints: gate, up, down.
_MEMBERS: tuple[Members, ...] = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


@dataclasses.dataclass(frozen=True)
class LayerNames:
    """The names that rules for modules are asked for."""

    prefix: str  # the layer's own, such as "model.layers.0.mlp.experts"; "" where it has none
    experts: int = 1
    members: Members = ()  # the names of an expert's matrices, where they are known

    @property
    def families(self) -> tuple[Members, ...]:
        """The names that an expert's matrices may have."""
        return (self.members,) if self.members else _MEMBERS

    def modules(self, members: Members) -> list[str]:
        """The matrices of all experts, or without members the experts."""
        experts = [f"{self.prefix}.{expert}" for expert in range(self.experts)]
        return [f"{name}.{member}" for name in experts for member in members] or experts


def members_of(mapping: Iterable[Row] | None) -> Members:
    """The names of an expert's matrices as an `expert_mapping` has them; empty without one."""
    found: dict[str, None] = {}
    for _, weight_name, _, _ in mapping or ():
        whole = weight_name.removesuffix(".").removesuffix(".base_layer")
        found.setdefault(whole.rpartition(".")[2])
    return tuple(found)


def modules_by_rules(config: Mapping[str, Any], names: LayerNames) -> tuple[str, ...] | None:
    """Modules whose scheme all matrices of a layer have by the rules of a configuration; None if
    they stay as they are. Empty for a layer without a name, and for methods without rules.

    Raises ConclaveUnsupportedError for matrices that do not have one scheme, with their names.
    """
    name = str(config["quant_method"])
    if not names.prefix or name not in _conclave.checkpoint_methods():
        return ()
    text = as_text(config)

    def said(members: Members) -> dict[str, Any]:
        return _conclave.method_layout(text, ".weight", 1, 1, names.modules(members))

    # Rules speak of the names that the model has; the others are to them as any name.
    other = said(())
    found = {members: said(members) for members in names.families}
    spoken_of = [members for members, layout in found.items() if layout != other]
    members = (spoken_of or list(found))[0]
    refuse_unread(name, found[members])
    if any(found[members] != found[more] for more in spoken_of):
        raise ConclaveUnsupportedError(
            f"expert_mapping: needed for {names.prefix!r}, since rules of quant_config tell "
            f"{' and '.join(', '.join(names) for names in spoken_of)} apart"
        )
    return None if found[members]["leaves_out"] else (names.modules(members)[0],)


def ignored_entries(stated: Mapping[str, Any]) -> list[str]:
    """Modules that a configuration leaves as they are; vLLM's of GGUF files lists them too. Those
    of `dynamic`, of which the first that holds counts, are for `modules_by_rules`."""
    others = {key: value for key, value in stated.items() if key != "dynamic"}
    return [*kept_modules(others), *(stated.get("unquantized_modules") or ())]


def is_ignored(prefix: str, entries: Iterable[str]) -> bool:
    """Whether a configuration leaves a layer of experts as it is.

    Args:
        prefix: the layer's name.
        entries: names of modules, which hold for all beneath them, "re:" and a pattern that a name
            must begin with, as compressed-tensors has them, or ModelOpt's with asterisks; also of
            an expert's matrices.

    Raises:
        ConclaveUnsupportedError: for a part of an expert's matrices. ConclaveValueError: for what
        is no pattern.
    """
    rules = [_rule(entry) for entry in entries]
    if any(rule(prefix) for rule in rules):
        return True
    for members in _MEMBERS:
        found = [any(rule(f"{prefix}.0.{name}") for rule in rules) for name in members]
        if all(found):
            return True
        if any(found):
            named = [name for name, hit in zip(members, found, strict=True) if hit]
            raise ConclaveUnsupportedError(
                f"quant_config: ignores {', '.join(named)} of the experts of {prefix!r} and "
                "quantises the rest; all matrices of an expert have one scheme"
            )
    return False


def _rule(entry: str) -> Callable[[str], bool]:
    if "*" in entry and not entry.startswith("re:"):
        return lambda name: (
            fnmatch.fnmatchcase(name, entry) or fnmatch.fnmatchcase(name, f"{entry}.*")
        )
    if not entry.startswith("re:"):
        return lambda name: name == entry or name.startswith(f"{entry}.")
    try:
        pattern = re.compile(entry.removeprefix("re:"))
    except re.error as error:
        raise ConclaveValueError(f"ignore: {entry!r} is no pattern: {error}") from None
    return lambda name: pattern.match(name) is not None
