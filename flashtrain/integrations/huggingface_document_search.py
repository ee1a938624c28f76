"""transformers' search for packed documents in positions, at most once per forward, since it
synchronizes the device.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

# Positions that were made by counting, in which nobody needs to search.
_COUNTED = WeakTensorKeyDictionary()


class _Forward:
    """A running forward of a model, with what was searched in it."""

    def __init__(self, model: nn.Module, counts: bool, given: Mapping[str, Any]) -> None:
        self.model, self.counts, self.given = model, counts, given
        # positions that were searched, with the results.
        self.seen: list[tuple[Tensor, Tensor | None]] = []


class _Running(threading.local):
    """This thread's running forwards, the innermost last; a recomputation in the backward is not
    part of any."""

    def __init__(self) -> None:
        self.forwards: list[_Forward] = []


_running = _Running()


def begin_forward(model: nn.Module, counts: bool, given: Mapping[str, Any]) -> None:
    """Record that a model's forward begins in this thread.

    Args:
        model: The model.
        counts: Whether the model or its caller made the positions by counting, in which
            there are no packed documents.
        given: The call's arguments by name.
    """
    _running.forwards.append(_Forward(model, counts, given))


def end_forward(model: nn.Module) -> None:
    """Record that a model's forward has ended, with or without an exception."""
    # A hook before ours may have failed.
    if _running.forwards and _running.forwards[-1].model is model:
        _running.forwards.pop()


def counted(positions: Tensor) -> Tensor:
    """Record that no row of positions has packed documents, and return them."""
    _COUNTED[positions] = True
    return positions


def are_counted(positions: Any) -> bool:
    """Return whether positions were recorded by `counted`."""
    return isinstance(positions, Tensor) and positions in _COUNTED


def documents_of(positions: Tensor) -> Tensor | None:
    """Return the document ids (B, S) that transformers finds in positions (B, S); None if
    every row is one document."""
    from transformers.masking_utils import find_packed_sequence_indices as found

    whole: Any = getattr(found, "of_whole", found)
    return whole(positions)


def documents_beside_padding(tokens: int) -> Tensor | None:
    """Return documents_in of the running forward's positions and padding mask; None if it has no
    padding mask of `tokens` tokens."""
    given = _running.forwards[-1].given if _running.forwards else {}
    mask, crosses = given.get("attention_mask"), given.get("encoder_hidden_states") is not None
    if (
        crosses
        or not isinstance(mask, Tensor)
        or mask.is_meta
        or mask.dim() != 2
        or mask.shape[1] != tokens
    ):
        return None
    return documents_in(given.get("position_ids"), mask)


def documents_in(positions: Tensor | None, mask: Tensor) -> Tensor:
    """Return the ids (B, S) of documents packed into padded rows, where
    transformers looks for none.

    Args:
        positions: (B or 1, S), lowest at the first token of each document.
        mask: (B, S), 0 for padding; its other numbers may be those of documents: 1, 1, 2, 2, 0.
    """
    real, numbers = mask.bool(), mask.to(torch.int64).cummax(1).values
    begins = numbers.diff(prepend=numbers[:, :1]) > 0
    if isinstance(positions, Tensor) and positions.shape[1:] == mask.shape[1:]:
        begins = begins | (positions == positions.where(real, 2**31).amin(1, keepdim=True))
    return (begins & real & (real.cumsum(1) > 1)).cumsum(1)


def holds_no_documents(positions: Tensor) -> bool:
    """Return whether each row of positions (B or 1, S) is known to be one document,
    without reading the device."""
    known, found = _known(positions)
    return known and found is None


def found_once(positions: Tensor, find: Callable[[Tensor], Tensor | None]) -> Tensor | None:
    """Return find(positions), computed once per forward; None for meta tensors.

    Args:
        positions: (B, S).
        find: transformers' search for documents, which returns their ids or None.
    """
    known, found = _known(positions)
    if not known:
        found = find(positions)
        if _running.forwards and not torch.compiler.is_compiling():
            _running.forwards[-1].seen.append((positions, found))
    return found


def _known(positions: Tensor) -> tuple[bool, Tensor | None]:
    """Return (whether the documents in positions are known without a search, their ids; None if
    there are none or they are unknown)."""
    if positions.is_meta:
        return True, None
    if not _running.forwards or torch.compiler.is_compiling():
        return False, None
    forward = _running.forwards[-1]
    if forward.counts:
        return True, None
    return next(
        ((True, found) for x, found in forward.seen if _is_same(x, positions)), (False, None)
    )


def _is_same(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors of positions, (B or 1, S), are the same memory; one may be a row
    that the other expands to a batch. The caller must hold x, so that its memory is not reused."""
    repeated = all(each.shape[0] == 1 or each.stride(0) == 0 for each in (x, y))
    rows = repeated or (x.shape[0] == y.shape[0] and x.stride(0) == y.stride(0))
    return (
        rows
        and x.data_ptr() == y.data_ptr()
        and x.shape[1] == y.shape[1]
        and x.stride(1) == y.stride(1)
    )
