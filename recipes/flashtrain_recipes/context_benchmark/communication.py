"""What a way of sharing attention costs without its attention: exchanging, reordering and merging remain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from flashtrain.distributed.context import call


@contextmanager
def only_communicating() -> Iterator[None]:
    """Within it, the kernels' two passes of every way return zeros of the right shapes at once.

    All that the ways do besides calling them stays as it is. The results are meaningless.
    """
    before = call.forward, call.backward
    call.forward, call.backward = _forward, _backward
    try:
        yield
    finally:
        call.forward, call.backward = before


def _forward(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=call.summing_dtype(q.dtype))
    return q.new_zeros(q.shape), lse


def _backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
