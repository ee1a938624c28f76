"""Which rank holds which tokens of a sequence.

    layout = balanced(masks.document(ids, causal=True), degree=8)
    mine = layout.shard(tokens, rank)                       # (B, S) -> (B, n)
    whole = layout.unshard([part of rank 0, part of rank 1, ...])

Shapes: B batch rows, Bl rows of the layout (B, or 1 that all rows share), S sequence, R ranks (the degree), n tokens a
rank holds. Every rank holds as many, ascending, then padding: its label is "ignored", it sees nothing and is seen by
nothing. A layout follows from the mask and the degree alone: every rank computes the same one, without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from flashtrain.distributed.context.balance import APART, SAME, SHARED, deal
from flashtrain.distributed.context.bands import CAUSAL, FULL
from flashtrain.distributed.context.costs import visible_keys
from flashtrain.distributed.context.places import ascending, take
from flashtrain.errors import UserError, unknown
from flashtrain_kernels.masks import START, Mask

SMALLEST_BLOCK = 128  # the largest tile of queries that a kernel takes
LARGEST_BLOCK = 2048
BLOCKS_A_RANK = 64
LONGEST_APART = 8  # documents that are divided one after the other; then all above half the length at once, and so on
WHOLE_BLOCKS = 2  # a document of up to so many blocks is short: it is kept on one rank where that costs no balance


@dataclass(frozen=True)
class Layout:
    """tokens: (Bl, R, n) int64 on the host: the place in the sequence of each token that a rank holds, ascending, and
    -1 for padding, which comes last. seqlen: S. block: tokens that were dealt together. name: how they were dealt."""

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
        """x (B, S, ...) -> what the rank holds of it (B, n, ...), padding filled up. On any device."""
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
    check_degree(degree)
    held = -(-mask.seqlen_k // degree)
    return _of_blocks([[[rank] for rank in range(degree)]], mask.seqlen_k, held, "contiguous")


def head_tail(mask: Mask, degree: int) -> Layout:
    """2R chunks, of which rank r holds r and 2R - 1 - r ("zigzag"): even for one causal sequence, for nothing else."""
    check_degree(degree)
    chunk = -(-mask.seqlen_k // (2 * degree))
    return _of_blocks([[[rank, 2 * degree - 1 - rank] for rank in range(degree)]], mask.seqlen_k, chunk, "head-tail")


def balanced(mask: Mask, degree: int, block: int | None = None) -> Layout:
    """Blocks dealt by what their queries see (balance.py): even for any mask, and for packed documents.

    mask: of the whole sequence, in its order (on the host: its numbers are read). block: tokens that are dealt
    together; None: up to 2048, some 64 of them a rank; where the whole sequence is causal, or every token sees all, the
    few long runs of head_tail and contiguous, which are as even and which the kernels are fastest with. Raises
    UserError for a degree or block below 1.
    """
    check_degree(degree)
    length = mask.seqlen_k
    if block is None and mask.band in PLAIN and length % (2 * degree) == 0:
        return replace(PLAIN[mask.band](mask, degree), name="balanced")
    block = _block(length, degree) if block is None else block
    if block < 1:
        raise UserError(f"context blocks of {block} tokens. Possible: 1 or more.")
    rows = []
    work = [0] * degree
    for costs, starts in zip(visible_keys(mask).cpu().numpy(), mask.queries[START].cpu().numpy(), strict=True):
        sums = _block_sums(costs, block)
        dealt = deal(sums, _bonds(starts, block, -(-len(sums) // degree)), work)
        work = [load + int(sums[mine].sum()) for load, mine in zip(work, dealt, strict=True)]
        rows.append(dealt)
    return _of_blocks(rows, length, block, "balanced")


# Layouts that are even for masks without documents.
PLAIN: dict[tuple[int, int] | None, Callable[[Mask, int], Layout]] = {CAUSAL: head_tail, FULL: contiguous}
LAYOUTS: dict[str, Callable[[Mask, int], Layout]] = {
    "balanced": balanced,
    "head-tail": head_tail,
    "contiguous": contiguous,
}


def make_layout(name: str, mask: Mask, degree: int) -> Layout:
    """The layout of that name. UserError: no such name."""
    if name not in LAYOUTS:
        raise unknown("context layout", name, LAYOUTS)
    return LAYOUTS[name](mask, degree)


def check_degree(degree: int) -> None:
    """UserError for a degree below 1."""
    if degree < 1:
        raise UserError(f"a context-parallel degree of {degree}. Possible: 1 or more.")


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


def _block_sums(costs: np.ndarray, block: int) -> np.ndarray:
    padded = np.zeros(-(-len(costs) // block) * block, dtype=np.int64)
    padded[: len(costs)] = costs
    return padded.reshape(-1, block).sum(1)


def _bonds(starts: np.ndarray, block: int, room: int) -> list[np.ndarray]:
    """What holds each block to the one before it, in several strengths: see balance.deal. room: blocks a rank holds.

    starts: (S,) where the document of each token begins. In the first every document stays together that a rank has
    room for, in each of the next the longest of those is divided, and further down all above half the length, a quarter
    of it and so on.
    """
    if not len(starts):
        return [np.zeros(0, dtype=np.int64)]
    blocks = -(-len(starts) // block)
    length = np.bincount(starts, minlength=len(starts))[starts]
    first = slice(0, len(starts), block)
    shared = (starts[first] < np.arange(len(starts))[first]) & (length[first] <= WHOLE_BLOCKS * block)
    # A block belongs to the document in its middle: what others have in it is at most half a block.
    middle = np.minimum(np.arange(blocks) * block + block // 2, len(starts) - 1)
    owner, long = starts[middle], length[middle]
    same = np.concatenate(([False], owner[1:] == owner[:-1]))
    short = WHOLE_BLOCKS * block
    lengths = np.unique(long[(long > short) & (long <= room * block)])[::-1].tolist()
    tried, most = lengths[:LONGEST_APART], lengths[LONGEST_APART] if len(lengths) > LONGEST_APART else 0
    while most > short:
        tried.append(most)
        most //= 2
    weak = np.where(shared, SHARED, APART)
    return [*(np.where(same & (long <= longest), SAME, weak) for longest in tried), weak]


def _of_blocks(rows: list[list[list[int]]], seqlen: int, block: int, name: str) -> Layout:
    """The layout in which rank r of row b holds the blocks rows[b][r], ascending; none for what is past the end."""
    tokens = []
    held = max((len(mine) for ranks in rows for mine in ranks), default=0) * block
    for ranks in rows:
        for mine in ranks:
            starts = np.asarray(mine, dtype=np.int64)[:, None] * block
            places = (starts + np.arange(block)).reshape(-1)
            places = places[places < seqlen]
            tokens.append(np.pad(places, (0, held - len(places)), constant_values=-1))
    stacked = np.stack(tokens).reshape(len(rows), -1, held)
    longest = int((stacked >= 0).sum(-1).max(initial=0))
    return Layout(torch.from_numpy(np.ascontiguousarray(stacked[..., :longest])), seqlen, block, name)
