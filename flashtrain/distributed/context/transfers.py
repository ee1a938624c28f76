"""What is on its way between ranks while they compute, and the pieces of the heads that it goes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

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
