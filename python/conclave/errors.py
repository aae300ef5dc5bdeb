"""Exceptions of the package.

Every exception that the library raises is a `conclave.Error`, and also the built-in exception that
a Python programmer would expect: a wrong shape is a `ValueError`, a wrong type a `TypeError`, a
missing file a `FileNotFoundError`.
"""

from __future__ import annotations

import re

# How this package says what is wrong with an argument, before a call reaches the library.
_ARGUMENT = re.compile(r"([\w.\[\]]+): expected (.+), found (.+)", re.DOTALL)


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

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        said = _ARGUMENT.fullmatch(str(arguments[0])) if len(arguments) == 1 else None
        if said is not None:
            self.tensor, self.expected, self.found = said.groups()


# Each class has the code of what this package itself refuses by it; errors of the library bring
# their own.


class ConclaveValueError(Error, ValueError):
    """An argument has a wrong shape, stride, device or value."""

    code = 100
    name = "kInvalidArgument"


class ConclaveTypeError(Error, TypeError):
    """An argument has a wrong type."""

    code = 105
    name = "kDType"


class ConclaveRuntimeError(Error, RuntimeError):
    """A device failed, or an object is not in a state for the call."""

    code = 112
    name = "kState"


class ConclaveCancelledError(ConclaveRuntimeError):
    """The caller has ended the work. The package does not raise it by itself, since Ctrl-C is
    KeyboardInterrupt: a function of progress may, to end what tells it."""

    code = 116
    name = "kCancelled"


class ConclaveUnsupportedError(Error, NotImplementedError):
    """No kernel runs this; the message has the reason of every one."""

    code = 113
    name = "kUnsupported"


class ConclaveMemoryError(Error, MemoryError):
    """There is not enough memory."""

    code = 114
    name = "kOutOfMemory"


class ConclaveFileError(Error, OSError):
    """A file cannot be read or written."""

    code = 201
    name = "kFileAccess"


class ConclaveFileNotFoundError(ConclaveFileError, FileNotFoundError):
    """A file does not exist."""

    code = 200
    name = "kFileNotFound"


class ConclaveCheckpointError(Error, ValueError):
    """A model directory is damaged, inconsistent or unknown."""

    code = 500
    name = "kTensorMissing"


class ConclaveCommError(Error, ConnectionError):
    """Another rank is lost, late, or disagrees."""

    code = 701
    name = "kCommTimeout"
    peer: int = -1  # the rank to blame; -1: none in particular
    phase: str = ""  # what this rank was waiting for


_BY_CODE: dict[int, type[Error]] = {
    105: ConclaveTypeError,
    112: ConclaveRuntimeError,
    113: ConclaveUnsupportedError,
    114: ConclaveMemoryError,
    115: ConclaveRuntimeError,
    116: ConclaveCancelledError,
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
