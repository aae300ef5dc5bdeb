"""Exceptions of the package.

Every exception that the library raises is a `conclave.Error`, and also the built-in exception that
a Python programmer would expect: a wrong shape is a `ValueError`, a wrong type a `TypeError`, a
missing file a `FileNotFoundError`.
"""

from __future__ import annotations


class Error(Exception):
    """Base of all errors of the library.

    Attributes:
        code: stable number; docs/errors.md lists each with its cause and remedy.
        name: the code's name, such as ``"kShape"``.
        tensor: the argument, field or tensor that was wrong; empty where none is to blame.
        file: the file that was read; empty where there is none.
        expected, found, limit, hint: parts of the message; empty where they do not apply.
    """

    code: int = 199
    name: str = "kInternal"
    tensor: str = ""
    file: str = ""
    expected: str = ""
    found: str = ""
    limit: str = ""
    hint: str = ""


class ConclaveValueError(Error, ValueError):
    """An argument has a wrong shape, stride, device or value."""


class ConclaveTypeError(Error, TypeError):
    """An argument has a wrong type."""


class ConclaveRuntimeError(Error, RuntimeError):
    """A device failed, or an object is not in a state for the call."""


class ConclaveUnsupportedError(Error, NotImplementedError):
    """No kernel runs this; the message has the reason of every one."""


class ConclaveMemoryError(Error, MemoryError):
    """There is not enough memory."""


class ConclaveFileError(Error, OSError):
    """A file cannot be read or written."""


class ConclaveFileNotFoundError(ConclaveFileError, FileNotFoundError):
    """A file does not exist."""


class ConclaveCheckpointError(Error, ValueError):
    """A model directory is damaged, inconsistent or unknown."""


class ConclaveCommError(Error, ConnectionError):
    """Another rank is lost, late, or disagrees."""

    peer: int = -1  # the rank to blame; -1: none in particular
    phase: str = ""  # what this rank was waiting for


_BY_CODE: dict[int, type[Error]] = {
    105: ConclaveTypeError,
    112: ConclaveRuntimeError,
    113: ConclaveUnsupportedError,
    114: ConclaveMemoryError,
    115: ConclaveRuntimeError,
    199: ConclaveRuntimeError,
    200: ConclaveFileNotFoundError,
}
_BY_HUNDRED: dict[int, type[Error]] = {
    1: ConclaveValueError,
    2: ConclaveFileError,
    3: ConclaveCheckpointError,
    4: ConclaveCheckpointError,
    5: ConclaveCheckpointError,
    7: ConclaveCommError,
}
_DEVICE = 107


def from_code(
    code: int,
    name: str,
    message: str,
    file: str,
    tensor: str,
    expected: str,
    found: str,
    limit: str,
    hint: str,
) -> Error:
    """The exception for an error of the C++ library. Called by the extension module."""
    kind = _BY_CODE.get(code) or _BY_HUNDRED.get(code // 100, ConclaveRuntimeError)
    if code == _DEVICE and not tensor:  # the device itself, not where an argument lies
        kind = ConclaveRuntimeError
    error = kind(message)
    error.code = code
    error.name = name
    error.file = file
    error.tensor = tensor
    error.expected = expected
    error.found = found
    error.limit = limit
    error.hint = hint
    return error
