"""Which rank holds which tokens of a sequence, by what a mask costs: how many keys each query sees.

    layout = balanced(masks.document(ids, causal=True), degree=8)
    mine = layout.shard(tokens, rank)                       # (B, S) -> (B, n)
    whole = layout.unshard([part of rank 0, part of rank 1, ...])

Shapes: B batch rows, Bl rows of the layout and Bm of a mask (B, or 1 that all rows share), S sequence, R ranks (the
degree), n tokens a rank holds. Every rank holds the same number, in ascending order, then padding, which sees nothing,
is seen by nothing and has no label. A layout depends on the mask and the degree alone, and is computed on the host:
every rank computes the same one without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from flashtrain.distributed.context.balance import APART, SAME, SHARED, Run, deal, is_even
from flashtrain.distributed.context.exchange import ascending, take
from flashtrain.distributed.context.local_attention import CAUSAL, FULL
from flashtrain_kernels.masks import HIGH, HIGH2, LOW, LOW2, START, Mask

SMALLEST_BLOCK = 128  # the largest tile of queries that a kernel takes
LARGEST_BLOCK = 2048
BLOCKS_A_RANK = 64
LONGEST_APART = 8  # documents that are divided one after the other; then all above half the length at once, and so on
FINER = (1, 2, 4)  # divisors of the usual block size, tried one by one until the work is even
WHOLE_BLOCKS = 2  # a document of up to this many blocks is short: it stays on one rank if the work stays even


def visible_keys(mask: Mask) -> Tensor:
    """(Bm, Sq) int64: how many keys each query of a mask in sequence order sees, counted from its intervals."""
    rows = mask.queries.to(torch.int64).clamp(0, mask.seqlen_k)
    first = (rows[HIGH] - rows[LOW]).clamp(min=0)
    if rows.shape[0] == 5:
        return first
    second = (rows[HIGH2] - rows[LOW2]).clamp(min=0)
    both = (torch.minimum(rows[HIGH], rows[HIGH2]) - torch.maximum(rows[LOW], rows[LOW2])).clamp(min=0)
    # Where one of the intervals is empty they share nothing, wherever its ends are.
    both = torch.where((first > 0) & (second > 0), both, 0)
    return first + second - both


def attention_work(layout: Layout, costs: Tensor) -> np.ndarray:
    """(R,) int64: visible (query, key) pairs of each rank, summed over the rows. costs: from `visible_keys`."""
    real = layout.tokens >= 0
    rows = max(layout.tokens.shape[0], costs.shape[0])
    picked = costs.expand(rows, -1)[:, None].expand(-1, layout.degree, -1)
    work = picked.gather(2, layout.tokens.clamp(min=0).expand(rows, -1, -1))
    return torch.where(real, work, 0).sum((0, 2)).numpy()


def imbalance(work: np.ndarray) -> float:
    """max / mean of the ranks' work; 1 is a perfect partition."""
    mean = float(work.mean())
    return float(work.max()) / mean if mean > 0 else 1.0


@dataclass(frozen=True)
class Layout:
    """Which rank holds which tokens of a sequence.

    Attributes:
        tokens: (Bl, R, n) int64 on the host: the positions in the sequence of each rank's tokens, ascending; -1 for
            padding, which comes last.
        seqlen: S.
        block: the largest number of tokens that were assigned together.
        name: "contiguous", "head-tail" or "balanced".
    """

    tokens: Tensor
    seqlen: int
    block: int
    name: str

    @property
    def degree(self) -> int:
        """R."""
        return self.tokens.shape[1]

    @property
    def held(self) -> int:
        """n, padding included."""
        return self.tokens.shape[2]

    @property
    def padding(self) -> int:
        """The padding tokens of all ranks, a row."""
        return self.degree * self.held - self.seqlen

    def shard(self, x: Tensor, rank: int, fill: float = 0) -> Tensor:
        """x (B, S, ...), on any device -> the rank's part of it (B, n, ...), with `fill` for padding."""
        places = self.tokens[:, rank].to(x.device)
        mine = take(x, places.clamp(min=0))
        if not self.padding:
            return mine
        padding = (places < 0).view(*places.shape, *(1,) * (x.dim() - 2))
        return mine.masked_fill(padding, fill)

    def unshard(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `shard`: the parts (B, n, ...) of all ranks in their order -> (B, S, ...)."""
        joined = torch.cat(list(parts), 1)
        return take(joined, self.places.to(joined.device))

    @property
    def places(self) -> Tensor:
        """(Bl, S) int64: where each token of the sequence is in the ranks' parts, one after the other (R * n)."""
        flat = self.tokens.flatten(1)
        return ascending(flat)[:, : self.seqlen]

    def positions(self, rank: int) -> Tensor:
        """(Bl, n) int64: the place in the sequence of each of the rank's tokens; 0 for padding."""
        return self.tokens[:, rank].clamp(min=0)


def contiguous(mask: Mask, degree: int) -> Layout:
    """Rank r holds the r-th run of tokens. Under a causal mask the last rank works longest; for comparison."""
    held = -(-mask.seqlen_k // degree)
    runs = [[_run(rank, held, mask.seqlen_k)] for rank in range(degree)]
    return _of_runs([runs], mask.seqlen_k, held, "contiguous")


def head_tail(mask: Mask, degree: int) -> Layout:
    """2R chunks, of which rank r holds r and 2R - 1 - r ("zigzag"): even for one causal sequence, for nothing else."""
    chunk = -(-mask.seqlen_k // (2 * degree))
    runs = [[_run(number, chunk, mask.seqlen_k) for number in (rank, 2 * degree - 1 - rank)] for rank in range(degree)]
    return _of_runs([runs], mask.seqlen_k, chunk, "head-tail")


def balanced(mask: Mask, degree: int, block: int | None = None) -> Layout:
    """Pieces assigned by what their queries see (balance.py): even for any mask, and for packed documents.

    Args:
        mask: of the whole sequence, in its order; best on the host, where it is read.
        degree: R.
        block: tokens that are assigned together, fewer at the ends of long documents. None: up to 2048, about 64 blocks
            a rank; for plain causal and full masks the layouts head_tail and contiguous, as even and the fastest for
            the kernels.
    """
    length = mask.seqlen_k
    if block is None and mask.band in PLAIN and length % (2 * degree) == 0:
        return replace(PLAIN[mask.band](mask, degree), name="balanced")
    costs, starts = visible_keys(mask).cpu().numpy(), mask.queries[START].cpu().numpy()
    first = _block(length, degree)
    tried = [max(1, first // finer) for finer in FINER] if block is None else [block]
    layout, least = None, 0
    for size in tried:
        rows, work = _assign(costs, starts, degree, size)
        if layout is None or max(work) < least:
            layout, least = _of_runs(rows, length, size, "balanced"), max(work)
        if is_even(work):
            break
    assert layout is not None
    return layout


def _assign(costs: np.ndarray, starts: np.ndarray, degree: int, block: int) -> tuple[list[list[list[Run]]], list[int]]:
    """(the runs of each row's ranks, the ranks' work), for blocks of this size. costs, starts: (rows, S)."""
    room = -(-costs.shape[1] // degree)
    rows = []
    work = [0] * degree
    for of_tokens, of_documents in zip(costs, starts, strict=True):
        edges = _edges(of_documents, block)
        runs, work = deal(of_tokens, edges, _bonds(of_documents, edges, block, room), room, work)
        rows.append(runs)
    return rows, work


# Layouts that are even for masks without documents.
PLAIN: dict[tuple[int, int] | None, Callable[[Mask, int], Layout]] = {CAUSAL: head_tail, FULL: contiguous}
LAYOUTS: dict[str, Callable[[Mask, int], Layout]] = {
    "balanced": balanced,
    "head-tail": head_tail,
    "contiguous": contiguous,
}


def make_layout(name: str, mask: Mask, degree: int) -> Layout:
    """The layout of that name."""
    return LAYOUTS[name](mask, degree)


def _block(length: int, degree: int) -> int:
    """A power of two: some BLOCKS_A_RANK blocks a rank; if it can be, one that leaves no padding."""
    wanted = max(1, length // (degree * BLOCKS_A_RANK))
    block = 1 << (wanted.bit_length() - 1)
    block = min(max(block, SMALLEST_BLOCK), LARGEST_BLOCK)
    while block > 1 and length < 2 * degree * block:  # so short a sequence: at least two blocks a rank
        block //= 2
    smaller = block
    while smaller > 1 and length % (degree * smaller):
        smaller //= 2
    return smaller if length % (degree * smaller) == 0 and smaller >= min(block, SMALLEST_BLOCK) else block


def _edges(starts: np.ndarray, block: int) -> np.ndarray:
    """(pieces + 1,) ascending: 0, every multiple of `block`, where long documents begin and end, and S.

    starts: (S,) where the document of each token begins. A document whose end lies in another's block would have all of
    it fetched by the rank that holds that block.
    """
    length = len(starts)
    begins = np.unique(starts)
    ends = np.append(begins[1:], length)
    long = ends - begins > WHOLE_BLOCKS * block
    return np.unique(np.concatenate((np.arange(0, length, block), begins[long], ends[long], [length])))


def _bonds(starts: np.ndarray, edges: np.ndarray, block: int, room: int) -> list[np.ndarray]:
    """What holds each piece to the one before it, in several strengths: see balance.deal. room: tokens a rank holds.

    In the first every document stays together that a rank has room for, in each of the next the longest of those is
    divided, and further down all above half the length, a quarter of it and so on.
    """
    first = edges[:-1]
    owner = starts[first]
    long = np.bincount(starts, minlength=len(starts) + 1)[owner]
    short = WHOLE_BLOCKS * block
    shared = (owner < first) & (long <= short)
    same = np.concatenate(([False], owner[1:] == owner[:-1])) & (long > short)
    lengths = np.unique(long[same & (long <= room)])[::-1].tolist()
    tried, most = lengths[:LONGEST_APART], lengths[LONGEST_APART] if len(lengths) > LONGEST_APART else 0
    while most > short:
        tried.append(most)
        most //= 2
    weak = np.where(shared, SHARED, APART)
    return [*(np.where(same & (long <= longest), SAME, weak) for longest in tried), weak]


def _run(number: int, size: int, length: int) -> Run:
    """The run of this number, of so many tokens each, as far as there are any."""
    return min(number * size, length), min((number + 1) * size, length)


def _of_runs(rows: list[list[list[Run]]], seqlen: int, block: int, name: str) -> Layout:
    """The layout in which rank r of row b holds the runs rows[b][r], ascending."""
    parts = [
        np.concatenate([np.arange(begin, end, dtype=np.int64) for begin, end in [*mine, (0, 0)]])
        for ranks in rows
        for mine in ranks
    ]
    held = max(map(len, parts), default=0)
    padded = [np.pad(part, (0, held - len(part)), constant_values=-1) for part in parts]
    return Layout(torch.from_numpy(np.stack(padded).reshape(len(rows), -1, held)), seqlen, block, name)
