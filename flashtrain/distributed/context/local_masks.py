"""The part of a mask that concerns the queries and keys that one rank holds, in the form the kernels are fastest with.

B batch, Bm rows of a mask, Bl rows of a layout, S sequence, m queries and p keys held, in ascending order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain_kernels.masks import HIGH, HIGH2, LOW, LOW2, SEQUENCE, Mask

NOWHERE = 2**30 - 1  # the position of a padding key: past every interval (positions stay below 2^30)


def check_whole(mask: Mask, seqlen: int) -> None:
    """UserError for a mask that is not of the whole sequence, in its order."""
    if mask.keys is not None or mask.queries.shape[2] != seqlen or mask.seqlen_k != seqlen:
        raise UserError(
            f"a mask of {mask.queries.shape[2]} queries and {mask.seqlen_k} keys for a sequence of {seqlen} that is "
            "shared by several ranks. Possible: the mask of the whole sequence, in its order (made from what "
            "context.whole returns, not from a rank's own part)."
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
    interval of places, and the Hopper kernels take only such masks.
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
