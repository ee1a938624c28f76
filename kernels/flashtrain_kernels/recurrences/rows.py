"""Where documents begin in packed rows, and the chunks of tokens in which recurrences read them.

Shapes: B batch, S sequence, T = B S tokens of all rows, N documents, c chunks of C slots.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Chunks(NamedTuple):
    """Tokens in chunks that never cross a document: its last one ends in slots of zeros, which change no state."""

    tokens: Tensor  # (c * C,) int64, the token in each slot; T in slots of zeros
    slots: Tensor  # (T,) int64, the slot of each token
    begins: list[bool]  # whether a document begins with each chunk

    def split(self, x: Tensor) -> Tensor:
        """Return x (B, S, ...) as (c, C, ...)."""
        flat = torch.cat((x.flatten(0, 1), x.new_zeros(1, *x.shape[2:])))
        return flat[self.tokens].unflatten(0, (len(self.begins), -1))

    def join(self, x: Tensor, like: Tensor) -> Tensor:
        """Return x (c, C, ...) as (B, S, ...), with the B and S of `like`."""
        return x.flatten(0, 1)[self.slots].unflatten(0, like.shape[:2])


class Rows:
    """The documents of packed rows.

    Args:
        positions: (B, S) integers. A document begins with each row, and where a position is not the one before plus
            one, which is transformers' rule. Padding that counts on is part of the document before it.
    """

    def __init__(self, positions: Tensor) -> None:
        begins = torch.nn.functional.pad(positions.diff(dim=1) != 1, (1, 0), value=True).flatten()
        place = torch.arange(begins.numel(), device=positions.device)
        self.positions = positions
        self.bounds = torch.cat((place[begins], place[-1:] + 1)).to(torch.int32)  # (N + 1,), as flash-attn's cu_seqlens
        self.since = place - torch.where(begins, place, 0).cummax(0).values  # (T,), tokens of its document before each
        self.packed = len(self.bounds) - 1 > len(positions)  # whether a row has several documents
        self._chunks: dict[int, Chunks] = {}

    def chunks(self, size: int) -> Chunks:
        """Return the tokens in chunks of `size`; the first call for a size synchronizes the device."""
        if size not in self._chunks:
            lengths, total = self.bounds.diff(), len(self.since)
            counts = (lengths + size - 1) // size
            first = counts.cumsum(0) - counts  # each document's first chunk
            slots = first.repeat_interleave(lengths) * size + self.since
            begins = torch.zeros(int(counts.sum()), dtype=torch.bool, device=slots.device).index_fill(0, first, True)
            tokens = slots.new_full((len(begins) * size,), total)
            tokens[slots] = torch.arange(total, device=slots.device)
            self._chunks[size] = Chunks(tokens, slots, begins.tolist())
        return self._chunks[size]


def in_full_precision(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make an operator compute in float32 (float64 stays), also under autocast; it returns its first input's dtype."""

    @wraps(operator)
    def computed(*given: Any) -> Tensor:
        with torch.autocast(given[0].device.type, enabled=False):
            return operator(*map(_wide, given)).to(given[0].dtype)

    return computed


def _wide(x: Any) -> Any:
    return x.to(torch.promote_types(x.dtype, torch.float32)) if isinstance(x, Tensor) else x
