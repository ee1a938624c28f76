"""The part of a mask that one rank computes, in the form that the kernels compute fastest.

A plain causal, full or window mask is a band, which the kernels compute faster than a mask in
memory. A rank that holds a few runs of neighbouring tokens needs one band a run: the run sees all
keys before it, and itself causally.

Shapes: Bm rows of a mask, Bl rows of a layout, S sequence, m queries and p keys on this rank (or on
the ranks that divide the heads with it), in ascending order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashtrain_kernels.masks import HIGH, HIGH2, LOW, LOW2, SEQUENCE, Mask

FULL, CAUSAL = (-1, -1), (-1, 0)  # windows
MAX_CALLS = 4  # more are small ones, which leave the device idle between them
# The position of a padding key: past every interval (positions stay below 2^30).
NOWHERE = 2**30 - 1


class BandCall(NamedTuple):
    """The part of an attention that one kernel call computes with a window instead of a mask."""

    queries: slice  # of this rank's queries
    keys: int  # the number of keys, counted from this rank's first key
    # flash-attn's window_size (left, right), aligned to the last query and the last key.
    window: tuple[int, int]


Part = Mask | tuple[BandCall, ...]


class LocalMasks:
    """Makes this rank's parts of a mask of the whole sequence, planned (Mask.planned) once for
    the kernels of all layers.

    Args:
        mask: the mask of the whole sequence.
        batch: the number of rows, B.
        head_dim: the head dimension, D.
        dtype: the dtype of q, k and v.
        dropout: whether attention weights are dropped.
        softcap: whether scores are bounded by a softcap.
    """

    def __init__(
        self,
        mask: Mask,
        batch: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        dropout: bool = False,
        softcap: bool = False,
    ) -> None:
        self.mask, self.device, self.batch, self.dtype = mask, mask.queries.device, batch, dtype
        self._mask = _numbered(mask, batch) if dropout else mask
        self._sizes, self._dropout, self._softcap = (head_dim, dtype), dropout, softcap

    def part(self, queries: Tensor | None, keys: Tensor | None) -> Part:
        """Return the mask between some of the queries and some of the keys.

        Args:
            queries: (Bl, m) positions in the sequence, ascending, or -1 for those that
                see no key; None: all.
            keys: (Bl, p) positions, ascending, then -1 for padding, which no query sees; None: all.

        Returns:
            BandCalls, where a few calls with windows suffice (queries in none of them see no
            key); otherwise a Mask.
        """
        mask, calls = self._mask, None
        if mask.band is not None and mask.queries.shape[2] == mask.seqlen_k:
            calls = _calls(
                mask.band,
                _places(queries, mask.seqlen_k),
                _places(keys, mask.seqlen_k),
                mask.seqlen_k,
            )
        if calls is not None:
            return calls
        # Dropout draws its numbers by position.
        selected = _select(mask, queries, keys, positions=self._dropout)
        return selected.planned(*self._sizes, rich=self._dropout, softcap=self._softcap)


def _numbered(mask: Mask, batch: int) -> Mask:
    """Return the mask with a row for each row of the batch, whose sequences are numbered on from
    row to row: dropout's random numbers depend on a sequence's number."""
    # flash_attn_func numbers a shared mask itself, but a part of a mask no longer shows how many
    # sequences there are. There is no band: only a mask tells the kernels which sequence and
    # positions a part is of.
    if batch == 1 or mask.queries.shape[1] != 1:
        return mask._replace(band=None)
    rows = mask.queries.expand(-1, batch, -1).clone()
    row = torch.arange(batch, device=rows.device, dtype=torch.int32)[:, None]
    rows[SEQUENCE] += row * (mask.queries[SEQUENCE].amax() + 1)
    return Mask(rows, None, mask.seqlen_k)


def _select(mask: Mask, queries: Tensor | None, keys: Tensor | None, *, positions: bool) -> Mask:
    """Return the mask between these queries and keys, as Mask.select does, but for other tokens in
    each row and with padding. positions: whether the result stores the keys' positions."""
    # Ascending keys make an interval of positions an interval of indices below p, and then the
    # kernels have no positions to load. Dropout needs the positions.
    rows = mask.queries
    bounds = (LOW, HIGH, LOW2, HIGH2)[: len(rows) - 3]  # of one interval or two
    if queries is not None:
        batch, index = max(rows.shape[1], queries.shape[0]), queries.clamp(min=0).to(rows.device)
        rows = rows.expand(-1, batch, -1).gather(2, index.expand(len(rows), batch, -1))
        hidden = (queries < 0).to(rows.device).expand(rows.shape[1], -1)
        for bound in bounds:
            rows[bound] = rows[bound].masked_fill(hidden, 0)
    if keys is None:
        return mask if queries is None else Mask(rows, None, mask.seqlen_k)
    held = keys.to(rows.device)
    held = torch.where(held < 0, NOWHERE, held).to(torch.int32)
    if rows.shape[1] != held.shape[0]:
        batch = max(rows.shape[1], held.shape[0])
        rows, held = rows.expand(-1, batch, -1), held.expand(batch, -1)
    rows, held = rows.clone(), held.contiguous()
    for bound in bounds:
        rows[bound] = rows[bound].clamp(max=mask.seqlen_k)  # no interval reaches the padding
        if not positions:
            rows[bound] = torch.searchsorted(held, rows[bound].contiguous(), out_int32=True)
    return Mask(rows, held if positions else None, keys.shape[1])


def _places(tokens: Tensor | None, length: int) -> np.ndarray | None:
    """Return the tokens (m,) without padding (for tokens=None all `length`); None if the rows of a
    batch hold different tokens, or if padding is not last."""
    if tokens is None:
        return np.arange(length)
    if tokens.shape[0] != 1:
        return None
    held = tokens[0].cpu().numpy()
    real = held[held >= 0]
    return real if (held[: len(real)] >= 0).all() else None


def _calls(
    band: tuple[int, int], queries: np.ndarray | None, keys: np.ndarray | None, length: int
) -> tuple[BandCall, ...] | None:
    """Return the kernel calls with windows that compute a band (left, right) between these tokens;
    None if there are none, or if they are more than MAX_CALLS."""
    if queries is None or keys is None:
        return None
    if len(queries) == len(keys) == length or band == FULL:
        if len(queries) and len(keys):
            return (BandCall(slice(0, len(queries)), len(keys), band),)
        return ()
    if band != CAUSAL:
        return None
    calls: list[BandCall] = []
    for start, stop in _runs(queries):
        first, last = (
            int(np.searchsorted(keys, queries[place], side="right")) for place in (start, stop - 1)
        )
        if first == last:
            call = BandCall(slice(start, stop), last, FULL)
        elif last - first == stop - start - 1 and first and keys[first - 1] == queries[start]:
            call = BandCall(slice(start, stop), last, CAUSAL)
        else:
            return None
        if call.keys:
            _add(calls, call)
    return tuple(calls) if len(calls) <= MAX_CALLS else None


def _runs(queries: np.ndarray) -> list[tuple[int, int]]:
    """Return the runs of consecutive tokens, as (start, stop) indices into `queries`."""
    if not len(queries):
        return []
    cuts = np.flatnonzero(np.diff(queries) != 1) + 1
    return list(zip([0, *cuts.tolist()], [*cuts.tolist(), len(queries)], strict=True))


def _add(calls: list[BandCall], call: BandCall) -> None:
    """Append a call, or extend the last call where a single kernel call computes both."""
    if calls and calls[-1].window == call.window and calls[-1].queries.stop == call.queries.start:
        grown = call.queries.stop - call.queries.start if call.window == CAUSAL else 0
        if calls[-1].keys + grown == call.keys:
            calls[-1] = BandCall(
                slice(calls[-1].queries.start, call.queries.stop), call.keys, call.window
            )
            return
    calls.append(call)
