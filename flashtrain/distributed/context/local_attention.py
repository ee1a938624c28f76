"""The attention that one rank computes locally, under its part of the mask.

This part takes the form that the kernels compute fastest: for a plain causal, full or window mask a band, which is
faster than the same mask as data. A rank that holds a few runs of neighbouring tokens has such bands: each run sees all
keys before it, and itself causally.

B batch, Bm rows of a mask, Bl rows of a layout, S sequence, n tokens a rank holds, m queries and p keys held (of the
ranks that divide the heads), in ascending order, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain_kernels import attention_backward, attention_forward
from flashtrain_kernels.masks import HIGH, HIGH2, LOW, LOW2, SEQUENCE, Mask

NOWHERE = 2**30 - 1  # the position of a padding key: past every interval (positions stay below 2^30)


def check_whole(mask: Mask, seqlen: int) -> None:
    """UserError for a mask that is not of the whole sequence, in its order."""
    if mask.keys is not None or mask.queries.shape[2] != seqlen or mask.seqlen_k != seqlen:
        raise UserError(
            f"the mask has {mask.queries.shape[2]} queries and {mask.seqlen_k} keys, expected {seqlen} of both: with "
            "context parallelism a mask is of the whole sequence, in its order. Make it from context.whole(...), not "
            "from a rank's own part."
        )


def numbered(mask: Mask, batch: int) -> Mask:
    """The mask with rows that count their sequences on from row to row, as dropout's random numbers need it.

    flash_attn_func numbers a shared mask so itself; a part of a mask no longer shows how many sequences there are. It
    has no band: only a mask tells the kernels which sequence and positions a part is of.
    """
    if batch == 1 or mask.queries.shape[1] != 1:
        return mask._replace(band=None)
    rows = mask.queries.expand(-1, batch, -1).clone()
    row = torch.arange(batch, device=rows.device, dtype=torch.int32)[:, None]
    rows[SEQUENCE] += row * (mask.queries[SEQUENCE].amax() + 1)
    return Mask(rows, None, mask.seqlen_k)


def part(mask: Mask, queries: Tensor | None, keys: Tensor | None, *, positions: bool) -> Mask:
    """The mask of some queries and some keys: Mask.select with rows of their own, padding, and in a faster form.

    queries: (Bl, m), keys: (Bl, p): ascending places in the sequence, then -1 for padding, which sees nothing and is
    seen by nothing; None: all of them. positions: whether the result keeps the keys' positions, as dropout needs;
    otherwise its intervals are those of the keys' places among the p: ascending keys make an interval of positions an
    interval of places, and then the kernels have no positions to load.
    """
    rows = mask.queries
    if queries is not None:
        rows = _gathered(rows, queries.clamp(min=0).to(rows.device))
        hidden = (queries < 0).to(rows.device).expand(rows.shape[1], -1)
        rows[LOW] = rows[LOW].masked_fill(hidden, 0)
        rows[HIGH] = rows[HIGH].masked_fill(hidden, 0)
        if rows.shape[0] == 7:
            rows[LOW2], rows[HIGH2] = rows[LOW2].masked_fill(hidden, 0), rows[HIGH2].masked_fill(hidden, 0)
    if keys is None:
        return mask if queries is None else Mask(rows, None, mask.seqlen_k)
    held = keys.to(rows.device)
    held = torch.where(held < 0, NOWHERE, held).to(torch.int32)
    if rows.shape[1] != held.shape[0]:
        batch = max(rows.shape[1], held.shape[0])
        rows, held = rows.expand(-1, batch, -1), held.expand(batch, -1)
    rows, held = rows.clone(), held.contiguous()
    for bound in (LOW, HIGH, LOW2, HIGH2)[: 2 if rows.shape[0] == 5 else 4]:
        rows[bound] = rows[bound].clamp(max=mask.seqlen_k)  # no interval reaches the padding
        if not positions:
            rows[bound] = torch.searchsorted(held, rows[bound].contiguous(), out_int32=True)
    return Mask(rows, held if positions else None, keys.shape[1])


def _gathered(rows: Tensor, index: Tensor) -> Tensor:
    """rows (5 or 7, Bm, S) at index (Bl, m) -> (5 or 7, max(Bm, Bl), m), a copy."""
    if index.shape[0] == 1:
        return rows.index_select(2, index[0])
    batch = max(rows.shape[1], index.shape[0])
    return rows.expand(-1, batch, -1).gather(2, index.expand(rows.shape[0], batch, -1))


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


def planned(part: Part, head_dim: int, dtype: torch.dtype, *, rich: bool = False, softcap: bool = False) -> Part:
    """The part made ready for every layer's attention of this head dimension and dtype, as Mask.planned."""
    return part.planned(head_dim, dtype, rich=rich, softcap=softcap) if isinstance(part, Mask) else part


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


@dataclass(frozen=True)
class Scores:
    """How scores become weights. scale: of q k^T. dropout: probability; seed: (1,) int64, the same on all ranks.
    softcap: scores become softcap * tanh(score / softcap); 0: none. sinks: (H,) one more score in every row of a head,
    whose value is nothing; sink_gradients: (H,) to which the backward adds what this rank computed of theirs."""

    scale: float
    dropout: float = 0.0
    seed: Tensor | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    sink_gradients: Tensor | None = None

    def seed_of(self, first_head: int) -> Tensor | None:
        """The kernels' seed for a call whose head 0 is the model's `first_head`: the same weights are dropped."""
        if self.seed is None:
            return None
        offsets = self.seed.new_zeros(1), self.seed.new_full((1,), first_head)
        return torch.cat((self.seed.reshape(1), *offsets))

    def with_sinks(self, out: Tensor, lse: Tensor, first_head: int) -> tuple[Tensor, Tensor]:
        """(out, lse) over all keys of the heads from `first_head` on -> over all keys and the sinks.

        These serve the backward over the keys as they are: weights are exp(score - lse), and a sink's value is 0.
        """
        if self.sinks is None:
            return out, lse
        sinks = self.sinks[first_head : first_head + lse.shape[1]].to(lse.dtype)[None, :, None]
        total = torch.logaddexp(lse, sinks)
        return out * torch.exp(lse - total).transpose(1, 2)[..., None].to(out.dtype), total

    def add_sink_gradients(self, dout: Tensor, out: Tensor, lse: Tensor, first_head: int) -> None:
        """Of these heads and queries, given what `with_sinks` returned: the sink's weight, and what a value of 0 is
        less than the row's output."""
        if self.sinks is None or self.sink_gradients is None:
            return
        heads = slice(first_head, first_head + lse.shape[1])
        weights = torch.exp(self.sinks[heads].to(lse.dtype)[None, :, None] - lse)
        share = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
        self.sink_gradients[heads] -= (weights * share).sum((0, 2)).to(self.sink_gradients.dtype)


class Way(Protocol):
    """One way of computing attention over a sequence that several ranks hold. Every rank must call it alike."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """q (B, n, H, D), k and v (B, n, K, D) of this rank -> out (B, n, H, D), and the log-sum-exp for backward."""

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of this rank's tokens, in the shapes and dtypes of q, k and v."""


def forward(q: Tensor, k: Tensor, v: Tensor, part: Part, scores: Scores, first_head: int = 0) -> tuple[Tensor, Tensor]:
    """(out, lse) of the local attention; 0 and -inf for queries that see nothing."""
    if isinstance(part, Mask):
        return attention_forward(
            q, k, v, mask=part, softmax_scale=scores.scale, softcap=scores.softcap, dropout_p=scores.dropout,
            dropout_seed=scores.seed_of(first_head),
        )  # fmt: skip
    if len(part) == 1 and part[0].queries == slice(0, q.shape[1]):
        return _band_forward(q, k, v, part[0], scores)
    out = torch.zeros_like(q)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=summing_dtype(q.dtype))
    for band in part:
        out[:, band.queries], lse[:, :, band.queries] = _band_forward(q[:, band.queries], k, v, band, scores)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    part: Part,
    scores: Scores,
    first_head: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the local attention, given out and lse over all keys; dk and dv may be in summing_dtype."""
    if isinstance(part, Mask):
        return attention_backward(
            dout, q, k, v, out, lse, mask=part, softmax_scale=scores.scale, softcap=scores.softcap,
            dropout_p=scores.dropout, dropout_seed=scores.seed_of(first_head),
        )  # fmt: skip
    if len(part) == 1 and part[0][:2] == (slice(0, q.shape[1]), k.shape[1]):
        return _band_backward(dout, q, k, v, out, lse, part[0], scores)
    dq = torch.zeros_like(q)
    dk, dv = (torch.zeros(x.shape, dtype=summing_dtype(x.dtype), device=x.device) for x in (k, v))
    for band in part:
        own, keys = band.queries, band.keys
        rows = dout[:, own], q[:, own], k, v, out[:, own], lse[:, :, own].contiguous()
        dq[:, own], to_keys, to_values = _band_backward(*rows, band, scores)
        dk[:, :keys] += to_keys
        dv[:, :keys] += to_values
    return dq, dk, dv


def _band_forward(q: Tensor, k: Tensor, v: Tensor, band: BandCall, scores: Scores) -> tuple[Tensor, Tensor]:
    keys = slice(0, band.keys)
    return attention_forward(
        q, k[:, keys], v[:, keys], window_size=band.window, softmax_scale=scores.scale, softcap=scores.softcap
    )


def _band_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: BandCall, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    keys = slice(0, band.keys)
    return attention_backward(
        dout, q, k[:, keys], v[:, keys], out, lse, window_size=band.window, softmax_scale=scores.scale,
        softcap=scores.softcap,
    )  # fmt: skip


def summing_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partial results are added up in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)
