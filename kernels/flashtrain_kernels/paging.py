"""Keys and values of packed sequences in pages.

N sequences, H query heads, K key/value heads, D head dimension. A table (N, M) names the pages
of each sequence's keys.
"""

from typing import Any

import torch
from torch import Tensor

from . import masks
from .arguments import autocasted, check_tensors, plain_window
from .attend import Requested
from .checks import check_device, check_dtype, check_flag, check_window
from .forms import PAGED
from .masks import HIGH, LOW, POSITION, START, Mask
from .packing import Packing, check_packing


def paged(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, block_table: Any, requested: Requested
) -> tuple[Tensor, Tensor, Requested]:
    """Gather paged k and v (pages, page size, K, D) into packed rows, differentiably. Return k, v
    and the call's arguments, `requested`, with a mask of these rows. Each sequence has rows for all
    pages in block_table (N, M)."""
    q, k, v = autocasted(q, k, v)
    check_block_table(block_table)
    check_tensors(PAGED, (q, k, v))
    check_flag("causal", requested.causal)
    window = plain_window(requested.window_size)
    check_window("window_size", window)
    check_packing(packing, (q, k, v), tokens_k=block_table.numel() * k.shape[1])
    cu_q, cu_k, _, longest = packing
    check_block_table(block_table, cu_k.shape[0] - 1, k)
    if requested.mask is not None:
        raise ValueError(
            "mask must be None with block_table: this call packs the keys, and makes their mask"
        )
    room, total = block_table.shape[1] * k.shape[1], block_table.numel() * k.shape[1]
    if isinstance(longest, int) and longest > room:
        raise ValueError(
            f"block_table must have pages for max_seqlen_k = {longest} keys, not for {room}"
        )
    made = masks.varlen(cu_q, cu_k, q.shape[0], total, causal=requested.causal, window=window)
    # From where a sequence's keys would lie without gaps to where they do.
    moved = (
        torch.arange(block_table.shape[0], device=q.device, dtype=torch.int32) * room - cu_k[:-1]
    )
    places = torch.arange(q.shape[0], device=q.device, dtype=torch.int32)
    shift = moved[(torch.searchsorted(cu_q, places, right=True) - 1).clamp(0, moved.shape[0] - 1)]
    rows = made.queries.clone()
    for row in (LOW, HIGH, POSITION, START):
        rows[row] += shift
    # Past a sequence's end, anything.
    pages = block_table.long().clamp(0, max(k.shape[0] - 1, 0)).flatten()
    packed = requested._replace(mask=Mask(rows, None, total), causal=False, window_size=(-1, -1))
    return k[pages].flatten(0, 1), v[pages].flatten(0, 1), packed


def check_block_table(
    block_table: Any, sequences: int | None = None, pages: Tensor | None = None
) -> None:
    """Raise TypeError or ValueError unless block_table is (N, M) int32: for each of N sequences,
    its pages' numbers. sequences: N, if known; pages (P, L, K, D): the cache, on whose device
    block_table must be, if known."""
    check_dtype("block_table", block_table, "(sequences, pages)", (torch.int32,))
    if block_table.dim() != 2 or sequences not in (None, block_table.shape[0]):
        of = "" if sequences is None else f" = ({sequences}, ...)"
        raise ValueError(
            f"block_table must have the shape (sequences, pages){of}, "
            f"not {tuple(block_table.shape)}"
        )
    if pages is None:
        return
    check_device("block_table", block_table, pages.device)
    if block_table.shape[1] > 0 and pages.shape[0] == 0:
        raise ValueError("block_table must have no columns, as k and v hold no pages")
