"""How attention and positions are told that the tokens of a row are spread over several devices.

Models compute on the tokens that they are given; what needs the whole sequence (attention, and positions that were not
given) asks the spread sequence in force, if any. flashtrain.distributed.context provides one; models know only this.

B batch, n tokens of a row on this device, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from flashtrain_kernels import Mask


class SpreadSequence(Protocol):
    """A batch of sequences of which this device holds a part."""

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """(B or 1, n) int64: where in the sequence each of this device's tokens stands."""

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, mask: Mask | None, dropout: float
    ) -> Tensor:
        """Attention of this device's queries to the whole sequence: q (B, n, H, D), k and v (B, n, K, D) -> like q.

        mask: of the whole sequence; None: causal or full.
        """

    def refuse_own_part(self, keys: int, what: str) -> None:
        """UserError where attention (`what`, in words) that is computed on this device alone, over so many keys, is to
        this device's part of the sequence: what knows no way to share it asks before it computes."""


# One for the whole process, not for a thread: the backward's recomputation runs on autograd's own threads.
_in_force: SpreadSequence | None = None


def spread_sequence() -> SpreadSequence | None:
    """The spread sequence in force; None where a row is whole on its device."""
    return _in_force


@contextmanager
def spread_over(sequence: SpreadSequence | None) -> Iterator[None]:
    """Compute with this one in force."""
    global _in_force
    before, _in_force = _in_force, sequence
    try:
        yield
    finally:
        _in_force = before
