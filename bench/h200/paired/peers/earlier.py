"""Conclave of another commit: PAIRED_EARLIER names the folder that holds its conclave/, built with -DNB_DOMAIN=earlier."""

import importlib
import os
import sys

from ..plugin import Candidate, Missing
from . import ours

TITLE = "Conclave, an earlier commit"
WHAT = ours.WHAT
FORMATS = ours.FORMATS


def take_modules() -> dict:
    """What is imported of the package, which forgets it: two packages of one name are then imported side by side."""
    names = [name for name in sys.modules if name == "conclave" or name.startswith("conclave.")]
    return {name: sys.modules.pop(name) for name in names}


def import_from(folder: str):
    today = take_modules()
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("conclave")
    finally:
        sys.path.remove(folder)
        take_modules()
        sys.modules.update(today)


def open():
    folder = os.environ.get("PAIRED_EARLIER")
    if not folder or not os.path.isdir(os.path.join(folder, "conclave")):
        raise Missing("PAIRED_EARLIER names no folder that holds conclave/ of another build")
    earlier = import_from(os.path.abspath(folder))

    def candidates(problem):
        layer = ours.make_layer(earlier, problem.weights, problem.tokens)
        yield Candidate("planned", ours.forward_of(layer, problem), problem.layer_error)

    return candidates
