"""The layouts by name; "balanced" divides a sequence by how many keys each query sees.

A layout depends only on the mask and the number of ranks. It is computed on the host, the same on
every rank, without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flashtrain.distributed.context.balance import APART, SAME, SHARED, Run, assign, is_even
from flashtrain.distributed.context.layout import Layout, layout_of
from flashtrain.distributed.context.local_mask import CAUSAL, FULL
from flashtrain.distributed.context.work import attention_work, visible_keys
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.layer_spec import LayerSpec, mixers
from flashtrain_kernels.masks import START, Mask

MIN_BLOCK = 128  # the largest tile of queries that a kernel takes
MAX_BLOCK = 2048
BLOCKS_A_RANK = 64
# Documents that are divided one after the other; then all above half the length at once, and so on.
MAX_APART = 8
FINER = (1, 2, 4)  # divisors of the usual block size, tried one by one until the work is even
# A document of up to this many blocks is short: it stays on one rank if the work stays even.
WHOLE_BLOCKS = 2


def contiguous(mask: Mask, degree: int) -> Layout:
    """Make the layout in which rank r holds the r-th of R equal runs; under a causal mask
    the last has most work."""
    return _even("contiguous", mask.seqlen_k, degree)


def zigzag(mask: Mask, degree: int) -> Layout:
    """Make the layout of 2R chunks in which rank r holds chunks r and 2R - 1 - r: equal
    work under a causal mask."""
    return _even("zigzag", mask.seqlen_k, degree)


def even_runs(layout: str, length: int, degree: int) -> list[list[Run]]:
    """Return each rank's runs of equal chunks, "contiguous" or else zigzag; the last chunks may be
    shorter or empty."""
    single = layout == "contiguous" or degree == 1
    size = -(-length // (degree if single else 2 * degree))
    numbers = [(rank,) if single else (rank, 2 * degree - 1 - rank) for rank in range(degree)]
    return [
        [(min(n * size, length), min((n + 1) * size, length)) for n in mine] for mine in numbers
    ]


def _even(layout: str, length: int, degree: int) -> Layout:
    runs = even_runs(layout, length, degree)
    return layout_of([runs], length, runs[0][0][1])


def balanced(mask: Mask, degree: int) -> Layout:
    """Make a layout with nearly equal work for all ranks, under any mask and for packed documents.

    Runs of up to MAX_BLOCK tokens, about BLOCKS_A_RANK for each rank, are assigned by the number of
    keys that their queries see. Plain causal and full masks get the layouts zigzag and contiguous:
    equal work, and fastest to compute. Rows without documents get the layout contiguous if its
    work is nearly equal, as under a window: neighbors see each other's keys.

    Args:
        mask: the mask of the whole sequence; it is read on the host, so a mask
            on the CPU saves a copy.
        degree: the number of ranks, R.
    """
    length = mask.seqlen_k
    if mask.band in PLAIN and length % (2 * degree) == 0:
        return PLAIN[mask.band](mask, degree)
    seen, starts = visible_keys(mask).cpu(), mask.queries[START].cpu().numpy()
    if not starts.any():
        runs = contiguous(mask, degree)
        if not runs.padding and is_even(attention_work(runs, seen).tolist()):
            return runs
    costs = seen.numpy()
    block, layout, least = _block(length, degree), None, 0
    for size in (max(1, block // finer) for finer in FINER):
        rows, work = _assign(costs, starts, degree, size)
        if layout is None or max(work) < least:
            layout, least = layout_of(rows, length, size), max(work)
        if is_even(work):
            break
    assert layout is not None
    return layout


def _assign(
    costs: np.ndarray, starts: np.ndarray, degree: int, block: int
) -> tuple[list[list[list[Run]]], list[int]]:
    """Return (the runs of each row and rank, the work of each rank) for blocks of this size.
    costs: how many keys each query sees; starts: where its document begins; both (rows, S)."""
    room = -(-costs.shape[1] // degree)
    rows = []
    work = [0] * degree
    for of_tokens, of_documents in zip(costs, starts, strict=True):
        edges = _edges(of_documents, block)
        runs, work = assign(of_tokens, edges, _bonds(of_documents, edges, block, room), room, work)
        rows.append(runs)
    return rows, work


def _block(length: int, degree: int) -> int:
    """Return the usual block size in tokens, a power of two: a rank gets some BLOCKS_A_RANK
    blocks, and where possible no padding remains."""
    wanted = max(1, length // (degree * BLOCKS_A_RANK))
    block = 1 << (wanted.bit_length() - 1)
    block = min(max(block, MIN_BLOCK), MAX_BLOCK)
    # So short a sequence: at least two blocks a rank.
    while block > 1 and length < 2 * degree * block:
        block //= 2
    smaller = block
    while smaller > 1 and length % (degree * smaller):
        smaller //= 2
    return (
        smaller if length % (degree * smaller) == 0 and smaller >= min(block, MIN_BLOCK) else block
    )


def _edges(starts: np.ndarray, block: int) -> np.ndarray:
    """Return the ends of the pieces, (pieces + 1,) ascending: 0, every multiple of `block`, the
    begin and end of each long document, and S."""
    # A document whose end lies in another's block would be fetched whole by the rank
    # that holds that block.
    length = len(starts)
    begins = np.unique(starts)
    ends = np.append(begins[1:], length)
    long = ends - begins > WHOLE_BLOCKS * block
    return np.unique(
        np.concatenate((np.arange(0, length, block), begins[long], ends[long], [length]))
    )


def _bonds(starts: np.ndarray, edges: np.ndarray, block: int, room: int) -> list[np.ndarray]:
    """Return the argument `bonds` of balance.assign: what ties each piece to the piece before it,
    in one array for each attempt, the strongest ties first."""
    # In the first, every document that a rank has room for stays together. In each of the
    # next the longest of those is divided, and further down all above half the length, a
    # quarter of it and so on.
    first = edges[:-1]
    owner = starts[first]
    long = np.bincount(starts, minlength=len(starts) + 1)[owner]
    short = WHOLE_BLOCKS * block
    shared = (owner < first) & (long <= short)
    same = np.concatenate(([False], owner[1:] == owner[:-1])) & (long > short)
    lengths = np.unique(long[same & (long <= room)])[::-1].tolist()
    tried, limit = lengths[:MAX_APART], lengths[MAX_APART] if len(lengths) > MAX_APART else 0
    while limit > short:
        tried.append(limit)
        limit //= 2
    weak = np.where(shared, SHARED, APART)
    return [*(np.where(same & (long <= limit), SAME, weak) for limit in tried), weak]


def layout_for(layout: str, layers: Sequence[LayerSpec], method: str) -> str:
    """Return the layout by which devices share a model's sequences if `layout` is requested.

    Between layers that pass states "balanced" would pass one at each of its many blocks. Theirs is
    "contiguous" if attention is even there, by windows or by ulysses, else "zigzag".
    """
    if layout != "balanced" or all(one.mixer.crosses_devices != "state" for one in layers):
        return layout
    even = method == "ulysses" or all(one.window for one in mixers(layers, AttentionSpec))
    return "contiguous" if even else "zigzag"


# Layouts that are even for masks without documents.
PLAIN: dict[tuple[int, int] | None, Callable[[Mask, int], Layout]] = {
    CAUSAL: zigzag,
    FULL: contiguous,
}
LAYOUTS: dict[str, Callable[[Mask, int], Layout]] = {
    "balanced": balanced,
    "zigzag": zigzag,
    "contiguous": contiguous,
}
