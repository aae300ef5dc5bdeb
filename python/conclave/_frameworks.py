"""The array libraries that callers bring. None is imported: what is not loaded is not in use."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from conclave.errors import ConclaveTypeError

_TORCH: Any = None


def torch() -> Any:
    """The module, once `import torch` has finished; else None."""
    global _TORCH
    if _TORCH is None:
        module = sys.modules.get("torch")
        if module is not None and hasattr(module, "get_num_threads"):
            _TORCH = module
    return _TORCH


def is_torch(array: Any) -> bool:
    module = torch()
    return module is not None and isinstance(array, module.Tensor)


def _library(array: Any) -> str:
    return type(array).__module__.partition(".")[0]


def device_of(array: Any) -> str:
    """Where an array lies, as a context's device: "cpu", "cuda:0"."""
    if is_torch(array):
        device = array.device
        if device.type != "cuda":
            return "cpu"
        return f"cuda:{device.index or 0}"
    dlpack_device = getattr(array, "__dlpack_device__", None)
    if dlpack_device is not None:
        kind, index = dlpack_device()
        if int(kind) in (2, 13):
            return f"cuda:{int(index)}"
    return "cpu"


def shape_of(array: Any, argument: str) -> tuple[int, ...]:
    """An array's shape. What has none is refused."""
    shape = getattr(array, "shape", None)
    if shape is None:
        raise ConclaveTypeError(
            f"{argument}: an argument is no array; expected numpy, torch, or anything with "
            f"__dlpack__; found {type(array).__name__}"
        )
    return tuple(shape)


def dtype_name(array: Any) -> str:
    """The type of an array's elements: "bfloat16"."""
    dtype = array.dtype
    return getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")


def empty_like(reference: Any, shape: Sequence[int], dtype: str | None, argument: str) -> Any:
    """Uninitialised memory from the library that made `reference`, on its device.

    `dtype` None: that of the reference. Libraries whose arrays cannot be written, and unknown ones,
    get numpy's memory on the CPU; on a GPU the caller must give `argument`.
    """
    if is_torch(reference):
        module = torch()
        kind = reference.dtype if dtype is None else getattr(module, dtype)
        return module.empty(tuple(shape), dtype=kind, device=reference.device)
    if _library(reference) == "cupy":
        return sys.modules["cupy"].empty(tuple(shape), dtype=dtype or reference.dtype)
    if device_of(reference) != "cpu":
        raise ConclaveTypeError(
            f"{argument}: memory of {_library(reference)} on a GPU cannot be made here; "
            f"give the array to be written"
        )
    import numpy

    if dtype is not None:
        return numpy.empty(tuple(shape), dtype=dtype)
    return numpy.empty(tuple(shape), dtype=getattr(reference, "dtype", None) or "float32")


def concatenate(arrays: Sequence[Any], axis: int) -> Any:
    """A copy of arrays of torch, cupy or numpy, one behind the other."""
    if is_torch(arrays[0]):
        return torch().cat(list(arrays), dim=axis)
    return sys.modules[_library(arrays[0])].concatenate(list(arrays), axis=axis)


def as_float32(array: Any) -> Any:
    """The values of an array of torch, cupy or numpy, which may be itself."""
    if is_torch(array):
        return array.detach().to(torch().float32)
    return array.astype("float32")


def interleaved(first: Any, second: Any, axis: int) -> Any:
    """A copy with the elements of two arrays of one shape in turn along an axis."""
    module = torch() if is_torch(first) else sys.modules[_library(first)]
    shape = [int(size) for size in first.shape]
    shape[axis] *= 2
    return module.stack([first, second], axis + 1).reshape(shape)


def looked_up(ids: Any, table: Sequence[int]) -> Any:
    """The entries of a table at ids of torch, cupy or numpy; -1 for ids outside it."""
    if is_torch(ids):
        entries = torch().tensor([*table, -1], dtype=ids.dtype, device=ids.device)
        inside = (ids >= 0) & (ids < len(table))
        return entries[torch().where(inside, ids, len(table)).long()]
    module = sys.modules[_library(ids)]
    entries = module.asarray([*table, -1], dtype=ids.dtype)
    return entries[module.where((ids >= 0) & (ids < len(table)), ids, len(table))]


def as_signed_bytes(array: Any) -> Any:
    """A copy of unsigned bytes, each 128 less, as int8."""
    flipped = array.detach() ^ 128 if is_torch(array) else array ^ 128
    return flipped.view(torch().int8 if is_torch(array) else "int8")


def strides_of(array: Any) -> tuple[int, ...] | None:
    """Strides in elements; None of a library that does not say."""
    if is_torch(array):
        return tuple(array.stride()) if array.layout == torch().strided else None
    strides = getattr(array, "strides", None)
    if not isinstance(strides, tuple):
        return None
    return tuple(stride // array.dtype.itemsize for stride in strides)


def contiguous(array: Any) -> Any:
    """A copy of an array of torch, cupy or numpy whose elements lie in the order of its axes."""
    if is_torch(array):
        return array.detach().contiguous()
    return sys.modules[_library(array)].ascontiguousarray(array)


def on_the_host(array: Any) -> Any:
    """The array, dense and in the host's memory; maybe a copy. What is no array of numpy, cupy or
    torch stays as it is."""
    if is_torch(array):
        return array.detach().cpu().contiguous()
    return contiguous(array) if _library(array) in ("numpy", "cupy") else array


def stream_of(reference: Any, stream: Any) -> int:
    """The CUDA stream of a call as a number; 0 on the CPU, and for the legacy default stream.

    `stream` is a number, or an object of torch or cupy; None is the current stream of the library
    that made `reference`.
    """
    if stream is not None:
        for name in ("cuda_stream", "ptr"):
            handle = getattr(stream, name, None)
            if handle is not None:
                return int(handle)
        return int(stream)
    if is_torch(reference):
        if not reference.is_cuda:
            return 0
        return int(torch().cuda.current_stream(reference.device).cuda_stream)
    if _library(reference) == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    return 0


def copied_to(reference: Any, array: Any, stream: int) -> Any:
    """A copy of an array of numpy beside `reference`, an array of torch or cupy on a GPU, which is
    ready in the order of the stream. Nobody waits."""
    if not is_torch(reference):
        with sys.modules["cupy"].cuda.ExternalStream(stream):
            return sys.modules["cupy"].asarray(array)
    module = torch()
    device = reference.device
    current = module.cuda.current_stream(device)
    own = current if current.cuda_stream == stream else module.cuda.ExternalStream(stream, device)
    with module.cuda.stream(own):
        return module.from_numpy(array).pin_memory().to(device, non_blocking=True)


def synchronize(array: Any) -> None:
    """Waits for the work that makes an array on a GPU: loading reads it on streams of its own."""
    if is_torch(array) and array.is_cuda:
        torch().cuda.current_stream(array.device).synchronize()
    elif _library(array) == "cupy":
        sys.modules["cupy"].cuda.get_current_stream().synchronize()


# Below it a call is so short that clearing the counters of borrowed memory would show: scratch is
# the context's, which all layers share.
_LEAST_BORROWED_BYTES = 8 << 20


def scratch(reference: Any, num_bytes: int, stream: int) -> Any:
    """Scratch memory of a call from torch's allocator, to be let go as soon as the call is
    enqueued; None where the library has to bring it.

    Torch's memory is shared with everything else and can be freed. It belongs to torch's current
    stream, so that no other stream gets it. A graph that is being captured must not share with
    calls outside of it: it gets memory of its own pool, whatever the size.
    """
    if not is_torch(reference) or not reference.is_cuda:
        return None
    module = torch()
    if not module.cuda.is_current_stream_capturing():
        if num_bytes < _LEAST_BORROWED_BYTES:
            return None
        if stream != int(module.cuda.current_stream(reference.device).cuda_stream):
            return None
    return module.empty(num_bytes, dtype=module.uint8, device=reference.device)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """The function, which torch.compile calls as it is: it cannot trace the extension module."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        module = torch()
        if module is not None and module.compiler.is_compiling():
            return module.compiler.disable(function)(*arguments, **named)
        return function(*arguments, **named)

    return call  # type: ignore[return-value]
