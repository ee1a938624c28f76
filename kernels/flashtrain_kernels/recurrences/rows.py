"""Where documents begin in packed rows, and the chunks of tokens in which recurrences read them.

Shapes: B batch, S sequence, T = B S tokens of all rows, N documents, c chunks of C slots.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Chunks(NamedTuple):
    """Tokens in chunks that hold tokens of one document each. The last chunk of a document is
    filled up with zeros, which change no state."""

    size: int  # C
    slots: Tensor  # (T,) int64, the slot of each token
    begins: list[bool]  # whether a document begins with each chunk

    def split(self, x: Tensor) -> Tensor:
        """Return x (B, S, ...) as (c, C, ...)."""
        zeros = x.new_zeros(len(self.begins) * self.size, *x.shape[2:])
        # index_copy would save x for its backward.
        return zeros.index_put((self.slots,), x.flatten(0, 1)).unflatten(0, (-1, self.size))

    def join(self, x: Tensor, like: Tensor) -> Tensor:
        """Return x (c, C, ...) as (B, S, ...), with the B and S of `like`."""
        return x.flatten(0, 1)[self.slots].unflatten(0, like.shape[:2])


class Rows:
    """The documents of packed rows.

    Args:
        positions: (B, S) integers. A document begins with each row, and where a position is not
            the one before plus one, which is transformers' rule. Padding whose positions count
            on belongs to the document before it.
        begins: (B, S), where documents begin; None: by that rule.

    Attributes:
        state: (N, H, K, V), the documents' states before a recurrence, which sets it to those
            after; None: they are empty, and the last ones are not needed.
    """

    state: Tensor | None = None

    def __init__(self, positions: Tensor, begins: Tensor | None = None) -> None:
        if begins is None:
            begins = torch.nn.functional.pad(positions.diff(dim=1) != 1, (1, 0), value=True)
        begins = begins.flatten()
        place = torch.arange(begins.numel(), device=positions.device)
        self.positions = positions
        # (N + 1,), as flash-attn's cu_seqlens.
        self.bounds = torch.cat((place[begins], place[-1:] + 1)).to(torch.int32)
        # (T,), tokens of its document before each.
        self.since = place - torch.where(begins, place, 0).cummax(0).values
        self.packed = len(self.bounds) - 1 > len(positions)  # whether a row has several documents
        self._chunks: dict[int, Chunks] = {}

    def chunks(self, size: int) -> Chunks:
        """Return the tokens in chunks of `size`; the first call for a size
        synchronizes the device."""
        if size not in self._chunks:
            lengths = self.bounds.diff()
            counts = (lengths + size - 1) // size
            first = counts.cumsum(0) - counts  # each document's first chunk
            begins = torch.zeros(
                int(counts.sum()), dtype=torch.bool, device=first.device
            ).index_fill(0, first, True)
            slots = first.repeat_interleave(lengths) * size + self.since
            self._chunks[size] = Chunks(size, slots, begins.tolist())
        return self._chunks[size]


def in_full_precision(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Make an operator compute in float32 (float64 stays), also under autocast; it returns
    its first input's dtype. States that it returns beside stay in float32."""

    def wide(x: Any) -> Any:
        return x.to(torch.promote_types(x.dtype, torch.float32)) if isinstance(x, Tensor) else x

    @wraps(operator)
    def computed(*given: Any) -> Any:
        with torch.autocast(given[0].device.type, enabled=False):
            found = operator(*map(wide, given))
        dtype = given[0].dtype
        return found.to(dtype) if isinstance(found, Tensor) else (found[0].to(dtype), *found[1:])

    return computed
