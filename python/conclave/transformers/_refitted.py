"""A block's next weights, packed beside those that serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from conclave._watched import Watched
from conclave.errors import ConclaveRuntimeError, ConclaveValueError
from conclave.refit import Refit
from conclave.transformers._feed import stage_tensors
from conclave.transformers._places import Place, places_below
from conclave.transformers._traits import NotOurs


class RefittedBlock:
    """Of what `patch` has put in a block's place, with a layer of the library."""

    def __init__(self, block: Any, model: Any, parts: tuple[str, ...], names: Callable) -> None:
        """`model` has the block's configuration; `parts` are paths in it."""
        self._block, self._model, self._parts, self._names = block, model, parts, names
        self._below = {part: places_below(model, part) for part in parts}
        self._refit: Refit | None = None

    @property
    def places(self) -> list[Place]:
        return [place for below in self._below.values() for place in below.values()]

    @property
    def is_staged(self) -> bool:
        return self._refit is not None and self._refit.is_staged

    def begin(self, **options: Any) -> None:
        """As `Layer.refit`. Raises Error."""
        self._layer = self._block.layer
        # Ranks hear of the model's refit, by its own exchange.
        self._refit = self._layer.refit(**options, refusal="silent")

    def stage(self, values: Mapping[Place, torch.Tensor]) -> None:
        """Packs values of all its places. Raises Error."""

        def tensors_of(part: str) -> dict[str, torch.Tensor]:
            return {name: values[place] for name, place in self._below[part].items()}

        try:
            stage_tensors(self._refit, self._model, self._parts, self._names, tensors_of)
        except NotOurs as error:
            raise ConclaveValueError(f"{self._parts[0]}: {error}") from error

    def require_same(self) -> None:
        """Raises ConclaveRuntimeError where the block was packed anew meanwhile, or has to be."""
        block = self._block
        if block.layer is self._layer and block._watched.is_current(block._slots.tensors()):
            return
        raise ConclaveRuntimeError(
            f"{self._parts[0]}: its weights were changed while the refit was under way"
        )

    def commit(self, write: Callable[[Place], None]) -> None:
        """What was packed serves, and places that are still there have the same values."""
        block = self._block
        with block._lock.now:
            try:
                self._refit.commit()  # type: ignore[union-attr]
            finally:
                self._refit = None
            for place in self.places:
                if not place.is_released:
                    write(place)
            block._watched = Watched(block._slots.tensors())

    def rollback(self) -> None:
        if self._refit is not None:
            self._refit.rollback()
            self._refit = None
