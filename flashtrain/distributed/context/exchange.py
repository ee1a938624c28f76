"""Communication between the ranks that share a sequence.

R ranks (the degree), U of them dividing the heads (neighbours, which sit on one host), R / U rings. B batch rows, Bl
rows of an index (B, or 1 that all rows share), m and p tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class ContextGroup:
    """The process group whose ranks share a sequence, and its subgroups, which are made when first needed.

    Rank r = ring * U + place: the U ranks with one `ring` index divide the heads, the R / U ranks with one `place` pass
    keys and values around.

    Args:
        group: a torch.distributed process group; None: all ranks.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = dist.group.WORLD if group is None else group
        self.size = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self.ranks = dist.get_process_group_ranks(self.group)
        self._parts: dict[int, tuple[Any, Any]] = {}

    def parts(self, heads_degree: int) -> tuple[Any, Any]:
        """(the group that divides the heads, the group that forms a ring) of this rank, for U = heads_degree.

        Where new groups are needed, every rank of the job must ask at the same point (NCCL may split the communicator
        of all of them).
        """
        assert self.size % heads_degree == 0
        if heads_degree not in self._parts:
            self._parts[heads_degree] = self._split(heads_degree)
        return self._parts[heads_degree]

    def _split(self, heads_degree: int) -> tuple[Any, Any]:
        if heads_degree == self.size:
            return self.group, None
        if heads_degree == 1:
            return None, self.group
        ring, place = divmod(self.rank, heads_degree)
        heads = [self.ranks[ring * heads_degree + other] for other in range(heads_degree)]
        around = [self.ranks[other * heads_degree + place] for other in range(self.size // heads_degree)]
        # Each rank names its own two groups only; it need not know those of other context groups.
        return tuple(dist.new_group(ranks, use_local_synchronization=True) for ranks in (heads, around))


WORD = torch.int64


def take(x: Tensor, index: Tensor) -> Tensor:
    """x (B, m, ...) at index (Bl, p) along its second dimension -> (B, p, ...)."""
    words = _words(x)
    if index.shape[0] == 1:
        found = words.index_select(1, index[0])
    else:
        found = words[_rows(x), index]
    return found if words is x else found.view(x.dtype)


def put(target: Tensor, index: Tensor, x: Tensor) -> None:
    """Write x (B, p, ...) to target (B, m, ...), of its dtype, at index (Bl, p) along its second dimension."""
    words, written = _words(target), _words(x)
    if words is target or written is x:
        words, written = target, x
    if index.shape[0] == 1:
        words.index_copy_(1, index[0], written)
    else:
        words[_rows(x), index] = written


def ascending(tokens: Tensor) -> Tensor:
    """The order that makes tokens (Bl, p) ascending, padding (below 0) last; stable, so the same everywhere."""
    return torch.where(tokens < 0, torch.iinfo(torch.int64).max, tokens).argsort(dim=1, stable=True)


def inverse(order: Tensor, length: int) -> Tensor:
    """order (Bl, m): places among `length` -> (Bl, length): where each place is in the order, -1 for nowhere."""
    places = torch.full((order.shape[0], length), -1, dtype=torch.int64, device=order.device)
    index = torch.arange(order.shape[1], device=order.device).expand(order.shape[0], -1)
    return places.scatter_(1, order, index)


def _rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device)[:, None]


def _words(x: Tensor) -> Tensor:
    """The same memory as words of 8 bytes, where its last dimension is made of such: torch copies indexed elements one
    by one, so half-precision states at a quarter of what the memory could do. x itself elsewhere, and with gradients.
    """
    each = WORD.itemsize // x.element_size()
    if each <= 1 or x.dim() < 3 or (x.requires_grad and torch.is_grad_enabled()):
        return x
    whole = x.stride(-1) == 1 and not any(n % each for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
    return x.view(WORD) if whole else x


MOST_PIECES = 4  # of the key/value heads: two pieces are in memory at a time, and small messages are slow


class Piece(NamedTuple):
    """Some key/value heads, and the query heads that read them."""

    keys: slice
    queries: slice


def pieces_of(heads: int, kv_heads: int, most: int = MOST_PIECES) -> list[Piece]:
    """The heads in as many equal pieces as there may be, `most` at most."""
    count = max(pieces for pieces in range(1, most + 1) if kv_heads % pieces == 0)
    each, group = kv_heads // count, heads // kv_heads
    ends = [(index * each, (index + 1) * each) for index in range(count)]
    return [Piece(slice(first, past), slice(first * group, past * group)) for first, past in ends]


class Transfer:
    """The result of communication under way, and what was given to it, which must live until it is over."""

    def __init__(self, result: Tensor, given: Tensor, works: Sequence[Any]) -> None:
        self._result = result
        self._waiting: tuple[Tensor, Sequence[Any]] | None = (given, works)

    def arrived(self) -> Tensor:
        """The result, as soon as it is there (on a GPU: for what is launched from now on)."""
        if self._waiting is not None:
            for work in self._waiting[1]:
                work.wait()
            self._waiting = None
        return self._result
