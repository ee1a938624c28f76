"""Communication that goes on while attention is computed, some heads at a time.

H query heads, K key/value heads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

# Of the key/value heads: two pieces are in memory at a time, and small messages are slow.
MAX_PIECES = 4


def exchange_first() -> None:
    """Let NCCL's kernels go before those of attention, for which they would wait else; to be called
    before the process groups are made."""
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")


class Piece(NamedTuple):
    """The slice of the key/value heads that one transfer carries, and that of the
    query heads that read them."""

    keys: slice
    queries: slice


def pieces_of(heads: int, kv_heads: int, limit: int = MAX_PIECES) -> list[Piece]:
    """Divide H query heads and K key/value heads into equal pieces, as many as
    K allows up to `limit`."""
    count = max(pieces for pieces in range(1, limit + 1) if kv_heads % pieces == 0)
    each, group = kv_heads // count, heads // kv_heads
    ends = [(index * each, (index + 1) * each) for index in range(count)]
    return [Piece(slice(first, past), slice(first * group, past * group)) for first, past in ends]


class Transfer:
    """A communication that is under way.

    Args:
        received: the tensor or tensors that the communication fills.
        sent: what it reads, which must stay in memory until the communication is over.
        works: torch.distributed's work handles.
        finish: makes the result from `received`; None: `received` is the result.
    """

    def __init__(
        self,
        received: Any,
        sent: Any,
        works: Sequence[Any],
        finish: Callable[[Tensor], Any] | None = None,
    ) -> None:
        self._received = received
        self._waiting: tuple[Any, Sequence[Any]] | None = (sent, works)
        self._finish = finish

    def wait(self) -> None:
        """Wait until the communication is over, and free `sent`; on a GPU only later
        kernels wait, not the host."""
        if self._waiting is not None:
            for work in self._waiting[1]:
                work.wait()
            self._waiting = None

    def result(self) -> Any:
        """Wait until the communication is over, and return its result."""
        self.wait()
        return self._received if self._finish is None else self._finish(self._received)


def overlapped(
    pieces: Sequence[Piece], start: Callable[[Piece], Transfer]
) -> Iterator[tuple[Piece, Any]]:
    """Yield (piece, result of its transfer) for each piece of heads, while the next piece's
    transfer is under way.

    start(piece) begins a transfer. The first one begins in this call, before the iteration.
    """
    coming = [start(pieces[0])]

    def results() -> Iterator[tuple[Piece, Any]]:
        for index, piece in enumerate(pieces):
            result = coming.pop().result()
            if index + 1 < len(pieces):
                coming.append(start(pieces[index + 1]))
            yield piece, result

    return results()
