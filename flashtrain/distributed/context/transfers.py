"""Communication that goes on while attention is computed, some heads at a time.

H query heads, K key/value heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

MAX_PIECES = 4  # of the key/value heads: two pieces are in memory at a time, and small messages are slow


class Piece(NamedTuple):
    """Some key/value heads, and the query heads that read them."""

    keys: slice
    queries: slice


def pieces_of(heads: int, kv_heads: int, limit: int = MAX_PIECES) -> list[Piece]:
    """Divide H and K heads into as many equal pieces as K allows, at most `limit`."""
    count = max(pieces for pieces in range(1, limit + 1) if kv_heads % pieces == 0)
    each, group = kv_heads // count, heads // kv_heads
    ends = [(index * each, (index + 1) * each) for index in range(count)]
    return [Piece(slice(first, past), slice(first * group, past * group)) for first, past in ends]


class Transfer:
    """A communication that is under way.

    Args:
        received: the tensor that it fills.
        sent: the tensor that it reads, which must live until it is over.
        works: torch.distributed's handles.
        finish: makes the result from `received`; None: `received` is the result.
    """

    def __init__(
        self, received: Tensor, sent: Tensor, works: Sequence[Any], finish: Callable[[Tensor], Any] | None = None
    ) -> None:
        self._received = received
        self._waiting: tuple[Tensor, Sequence[Any]] | None = (sent, works)
        self._finish = finish

    def wait(self) -> None:
        """Wait until the communication is over (on a GPU: what is launched from now on waits), and free `sent`."""
        if self._waiting is not None:
            for work in self._waiting[1]:
                work.wait()
            self._waiting = None

    def result(self) -> Any:
        """The result, after waiting for it."""
        self.wait()
        return self._received if self._finish is None else self._finish(self._received)


def overlapped(pieces: Sequence[Piece], start: Callable[[Piece], Transfer]) -> Iterator[tuple[Piece, Any]]:
    """Yield each piece with the result of its transfer, while the transfer of the next piece is under way."""
    coming = start(pieces[0])
    for index, piece in enumerate(pieces):
        result = coming.result()
        if index + 1 < len(pieces):
            coming = start(pieces[index + 1])
        yield piece, result
