"""transformers' search for packed documents in positions, at most once per forward, since it synchronizes the device.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class _Forward:
    """A running forward of a model."""

    def __init__(self, model: nn.Module, counts: bool) -> None:
        self.model, self.counts = model, counts
        self.seen: list[tuple[Tensor, Tensor | None]] = []  # positions that were searched, with the results


class _Running(threading.local):
    """This thread's running forwards, the innermost last. Recomputation in a backward is in none."""

    def __init__(self) -> None:
        self.forwards: list[_Forward] = []


_running = _Running()


def begin_forward(model: nn.Module, counts: bool) -> None:
    """Record that a model's forward begins in this thread.

    Args:
        model: The model.
        counts: Whether the model makes its own positions 0, 1, 2, ..., in which there are no packed documents.
    """
    _running.forwards.append(_Forward(model, counts))


def end_forward(model: nn.Module) -> None:
    """Record that a model's forward has ended, with or without an exception."""
    if _running.forwards and _running.forwards[-1].model is model:  # a hook before ours may have failed
        _running.forwards.pop()


def documents_of(positions: Tensor) -> Tensor | None:
    """Return the document ids (B, S) that transformers finds in positions (B, S); None if every row is one document."""
    from transformers.masking_utils import find_packed_sequence_indices as found

    whole: Any = getattr(found, "of_whole", found)
    return whole(positions)


def holds_no_documents(positions: Tensor) -> bool:
    """Return whether each row of positions (B or 1, S) is known to be one document, without reading the device."""
    if positions.is_meta:
        return True
    forwards = _running.forwards
    if not forwards:
        return False
    return forwards[-1].counts or any(found is None and _is_same(x, positions) for x, found in forwards[-1].seen)


def found_once(positions: Tensor, find: Callable[[Tensor], Tensor | None]) -> Tensor | None:
    """Return find(positions), computed once per forward; None for meta tensors.

    Args:
        positions: (B, S).
        find: transformers' search for documents, which returns their ids or None.
    """
    if positions.is_meta:
        return None
    forwards = _running.forwards
    if not forwards or torch.compiler.is_compiling():
        return find(positions)
    if forwards[-1].counts:
        return None
    for x, found in forwards[-1].seen:
        if _is_same(x, positions):
            return found
    forwards[-1].seen.append((positions, found := find(positions)))
    return found


def _is_same(x: Tensor, y: Tensor) -> bool:
    """Whether positions (B or 1, S) share memory; a row may be expanded to a batch. x must be alive."""
    repeated = all(each.shape[0] == 1 or each.stride(0) == 0 for each in (x, y))
    rows = repeated or (x.shape[0] == y.shape[0] and x.stride(0) == y.stride(0))
    return rows and x.data_ptr() == y.data_ptr() and x.shape[1] == y.shape[1] and x.stride(1) == y.stride(1)
