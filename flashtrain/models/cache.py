"""Rows that are not whole on a device: spread over several, packed with others, or going on from a cache.

Models compute on the tokens that they are given; what needs the whole sequence (attention, and positions that were not
given) asks the spread sequence in force, if any. flashtrain.distributed.context provides one; models know only this.

B batch, S new tokens, n tokens of a row on this device, T packed tokens, H query heads, K key/value heads, D head
dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain_kernels import Mask


class SpreadSequence(Protocol):
    """A batch of sequences of which this device holds a part. length: S. held: n, padding included."""

    @property
    def length(self) -> int: ...
    @property
    def held(self) -> int: ...

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """(B or 1, n) int64: where in the sequence each of this device's tokens stands."""

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float,
        mask: Mask | None,
        dropout: float,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of this device's queries to the whole sequence: q (B, n, H, D), k and v (B, n, K, D) -> like q.

        mask: of the whole sequence; None: causal or full, within the window. sinks: (H,) one more score a row, whose
        value is nothing.
        """

    def refuse_own_part(self, keys: int, what: str) -> None:
        """UserError where attention (`what`, in words) that is computed on this device alone, over so many keys, is to
        this device's part of the sequence: what knows no way to share it asks before it computes."""

    def whole(self, name: str, device: torch.device) -> Tensor | None:
        """The batch's tensor of that name as it was before it was dealt, on the device; None where it had none."""

    def gathered(self, part: Tensor) -> Tensor:
        """What all devices hold of a tensor (B, n, ...), in the sequence's order (B, S, ...); all must call it."""

    def summed(self, x: Tensor) -> Tensor:
        """The sum of all devices' x, through which each has its gradient; all must call it."""

    def dealt(self, x: Tensor) -> Tensor:
        """What this device holds of x (B, S, ...): (B, n, ...)."""

    def next_labels(self, labels: Tensor) -> Tensor:
        """Labels (B, n) that stand at their own token -> at the token before it, which predicts it, of the whole
        sequence. The step's loss is the mean over these; every device must call it."""

    def weighted(self, loss: Tensor) -> Tensor:
        """See mean_over_context; the step is known to have done it."""


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


def whole(batch: Any, name: str) -> Tensor:
    """batch[name] as it was before the strategy dealt it to the ranks, (B, S, ...): what masks are made from.

        mask = masks.document(whole(batch, "documents"), causal=True)

    Outside of context parallelism it is batch[name] itself.
    """
    found = None if _in_force is None else _in_force.whole(name, batch[name].device)
    return batch[name] if found is None else found


def mean_over_context(loss: Tensor) -> Tensor:
    """A mean over this rank's labels, weighted so that the mean of all ranks' results is that over all labels.

    The strategy does it to what a step returns, gives to manual_backward or logs with sync_dist=True, unless the step
    called this: for one that makes something else of its mean. A step that only logs what this gives returns the loss
    as it was given, not a copy. Outside of context parallelism it is the loss itself.
    """
    return loss if _in_force is None else _in_force.weighted(loss)


class PackedSequences(NamedTuple):
    """Sequences in one row, for attention without our kernels, to which a mask of the row would be a T x T tensor.

    lengths: of the sequences, in the order in which they lie in the row. What follows them belongs to none.
    """

    lengths: tuple[int, ...]

    def attend(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """attention(q, k, v) of each sequence. q (1, T, H, D), k and v (1, T, K, D) -> (1, T, H, D); 0 in no sequence.

        No larger score matrix than that of one sequence exists at a time.
        """
        sizes = [length for length in self.lengths if length]
        used = sum(sizes)
        parts = zip(*(x[:, :used].split(sizes, dim=1) for x in (q, k, v)), strict=True) if sizes else ()
        rows = [attention(*part) for part in parts]
        rows.append(q.new_zeros(q.shape[0], q.shape[1] - used, *q.shape[2:]))
        return torch.cat(rows, dim=1)


class LayerCache:
    """The keys and values of one layer, in memory allocated once, at the first append, for `context` tokens."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds k and v (B, S, K, D); returns all keys and values so far (B, length, K, D), views into the cache.

        Not differentiable: for generation, under torch.no_grad(). UserError: more tokens than the cache holds.
        """
        start, end = self.length, self.length + k.shape[1]
        if end > self.context:
            raise UserError(f"{end} tokens for a cache of {self.context}. Possible: at most {self.context} tokens.")
        if self._keys is None or self._values is None:
            shape = (k.shape[0], self.context, *k.shape[2:])
            self._keys, self._values = k.new_empty(shape), v.new_empty(shape)
        self._keys[:, start:end] = k
        self._values[:, start:end] = v
        self.length = end
        return self._keys[:, :end], self._values[:, :end]


class KeyValueCache:
    """One LayerCache a layer. Pass it to a model's forward again and again with only the new tokens each time."""

    def __init__(self, layers: int, context: int) -> None:
        self.layers = [LayerCache(context) for _ in range(layers)]

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.layers[0].length

    def clear(self) -> None:
        """Forgets every token; the memory is kept for the next ones (of the same batch size, dtype and device)."""
        for layer in self.layers:
            layer.length = 0


def next_positions(tokens: int, cache: KeyValueCache | LayerCache | None, device: torch.device) -> Tensor:
    """Positions of the next tokens when none are given: counting on from the cache. int64, (1, S).

    Of a sequence spread over several devices: where this device's tokens stand in it, (B or 1, S).
    """
    spread = spread_sequence()
    if spread is not None and cache is None:
        return spread.positions(tokens, device)
    start = cache.length if cache is not None else 0
    return torch.arange(start, start + tokens, device=device)[None]
