"""What a peer is, and how peers are found.

A plug-in is a Python file with TITLE, WHAT (what its time holds), FORMATS and open() -> a function that takes a
Problem and yields candidates. open raises Missing where its engine is not on this machine. With GPT_OSS = True it takes
cases with biases and the clamped SwiGLU too. A plug-in whose engine compiles at run time may have
compile_ahead(case, list of tokens), which fills the engine's cache. Those of the folder peers are known by name; others
are given by path.
"""

import dataclasses
import importlib
import importlib.util
import pathlib
from collections.abc import Callable

PEERS = pathlib.Path(__file__).resolve().parent / "peers"


class Missing(Exception):
    """An engine, or a format of it, that is not here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way of an engine to do a cell; of several the fastest counts."""

    label: str
    run: Callable  # of the index of a routing; returns the tensors that it writes
    error: Callable  # of the list of what run returned: the relative error of the worst sampled row


@dataclasses.dataclass
class Peer:
    name: str
    title: str
    what: str
    formats: tuple
    candidates: Callable | None
    gpt_oss: bool = False
    reason: str = ""  # why there are no candidates


def known_names() -> list:
    return sorted(path.stem for path in PEERS.glob("*.py") if not path.stem.startswith("_"))


def load(name: str):
    """The module of a known peer or of a path."""
    if name in known_names():
        return importlib.import_module(f"{__package__}.peers.{name}")
    path = pathlib.Path(name)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"unknown peer {name!r}: expected one of {', '.join(known_names())}, or the path of a .py file")
    spec = importlib.util.spec_from_file_location(f"paired_plugin_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find(name: str) -> Peer:
    """A peer, or one that says why it is not here: a broken engine must not end the others' run."""
    module = load(name)
    short = pathlib.Path(name).stem
    peer = Peer(short, module.TITLE, module.WHAT, tuple(module.FORMATS), None, getattr(module, "GPT_OSS", False))
    try:
        peer.candidates = module.open()
    except Exception as error:
        peer.reason = one_line(error)
    return peer


def one_line(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    text = first if isinstance(error, Missing) else f"{type(error).__name__}: {first}"
    return text[:300]
