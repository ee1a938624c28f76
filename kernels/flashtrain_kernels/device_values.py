"""Values of small device tensors, read once: checks of cu_seqlens need them, and
reading waits for the device."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

# By the tensor object, with its version, which torch raises at every write: 48 layers that share
# one tensor wait once. Results are used for checks only, never to compute with.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def values_of(x: Tensor, summary: Callable[[Tensor], Tensor]) -> tuple[int, ...] | None:
    """Return the numbers in summary(x), or None where reading x would harm: under torch.compile,
    CUDA graph capture, or without data.

    A GPU tensor is read once for each time it is written to; always give a tensor the
    same summary. A CPU tensor is read every time, because numpy may write to its memory
    unseen by torch's version counter.
    """
    if torch.compiler.is_compiling() or _holds_no_data(x):
        return None
    if x.device.type == "cpu":
        return _read(x, summary)
    if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    return read_once(x, summary)


def read_once(x: Tensor, summary: Callable[[Tensor], Tensor]) -> tuple[int, ...]:
    """Return the numbers in summary(x); read from the device only if x was not read since
    it was last written to."""
    version = None if x.is_inference() else x._version
    known = _known.get(x)
    if known is not None and version is not None and known[0] == version:
        return known[1]
    values = _read(x, summary)
    _known[x] = (version, values)
    return values


def _read(x: Tensor, summary: Callable[[Tensor], Tensor]) -> tuple[int, ...]:
    with torch.no_grad():
        return tuple(summary(x).reshape(-1).tolist())


def _holds_no_data(x: Tensor) -> bool:
    return (
        x.device.type == "meta"
        or isinstance(x, FakeTensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(x)
    )
