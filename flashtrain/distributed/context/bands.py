"""What a rank computes under a plain causal, full or window mask: kernel calls that need no mask at all.

The kernels are faster with a band of their own than with a mask that says the same as data. A rank that holds a few
runs of neighbouring tokens has such bands: a run sees all keys up to its own, which come first, and itself causally.

m queries and p keys held, ascending.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashtrain.distributed.context.local_masks import part
from flashtrain_kernels.masks import Mask

FULL, CAUSAL = (-1, -1), (-1, 0)
MOST_CALLS = 4  # more are small ones, which leave the device idle between them


class BandCall(NamedTuple):
    """One call. queries: which of those held; keys: the first so many of those held; window: flash-attn's, aligned to
    the last query and the last key."""

    queries: slice
    keys: int
    window: tuple[int, int]


Part = Mask | tuple[BandCall, ...]


def local_part(mask: Mask, queries: Tensor | None, keys: Tensor | None, *, positions: bool = False) -> Part:
    """The part of a mask that these queries and keys have: as calls where there are such, else as local_masks.part.

    queries: (Bl, m), keys: (Bl, p): places in the sequence, ascending, then -1 for padding; None: all of them.
    Queries that no call has see nothing.
    """
    calls = None
    if mask.band is not None and not positions and mask.queries.shape[2] == mask.seqlen_k:
        calls = _calls(mask.band, _places(queries, mask.seqlen_k), _places(keys, mask.seqlen_k), mask.seqlen_k)
    return calls if calls is not None else part(mask, queries, keys, positions=positions)


def planned(part: Part, head_dim: int, dtype: torch.dtype, *, rich: bool = False) -> Part:
    """The part made ready for every layer's attention of this head dimension and dtype, as Mask.planned."""
    return part.planned(head_dim, dtype, rich=rich) if isinstance(part, Mask) else part


def _places(tokens: Tensor | None, length: int) -> np.ndarray | None:
    """(m,) the real tokens; None where the rows of a batch hold different ones."""
    if tokens is None:
        return np.arange(length)
    if tokens.shape[0] != 1:
        return None
    held = tokens[0].cpu().numpy()
    return held[held >= 0]


def _calls(
    band: tuple[int, int], queries: np.ndarray | None, keys: np.ndarray | None, length: int
) -> tuple[BandCall, ...] | None:
    """The calls; None where the band does not fall into a few."""
    if queries is None or keys is None:
        return None
    if len(queries) == len(keys) == length or band == FULL:
        return (BandCall(slice(0, len(queries)), len(keys), band),) if len(queries) and len(keys) else ()
    if band != CAUSAL:
        return None
    calls: list[BandCall] = []
    for start, stop in _runs(queries):
        first, last = (int(np.searchsorted(keys, queries[place], side="right")) for place in (start, stop - 1))
        if first == last:
            call = BandCall(slice(start, stop), last, FULL)
        elif last - first == stop - start - 1 and first and keys[first - 1] == queries[start]:
            call = BandCall(slice(start, stop), last, CAUSAL)
        else:
            return None
        if call.keys:
            _add(calls, call)
    return tuple(calls) if len(calls) <= MOST_CALLS else None


def _runs(queries: np.ndarray) -> list[tuple[int, int]]:
    """(start, stop) of the runs of neighbouring tokens."""
    if not len(queries):
        return []
    cuts = np.flatnonzero(np.diff(queries) != 1) + 1
    return list(zip([0, *cuts.tolist()], [*cuts.tolist(), len(queries)], strict=True))


def _add(calls: list[BandCall], call: BandCall) -> None:
    """Add a call, or make the last one longer where both are one."""
    if calls and calls[-1].window == call.window and calls[-1].queries.stop == call.queries.start:
        grown = call.queries.stop - call.queries.start if call.window == CAUSAL else 0
        if calls[-1].keys + grown == call.keys:
            calls[-1] = BandCall(slice(calls[-1].queries.start, call.queries.stop), call.keys, call.window)
            return
    calls.append(call)
