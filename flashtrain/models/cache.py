"""What models need to know of rows that they see in part: sharded over devices, packed, or continued from a cache.

Models compute on the tokens that they are given. Attention and default positions need the whole sequence: where a
sharded one is active (flashtrain.distributed.context provides it), they use its methods.

Shapes: B batch, S sequence (or new tokens), n tokens of a row on this device, T packed tokens, H query heads, K
key/value heads, D head dimension.
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
    """A batch of sequences sharded over devices. length: S. held: n, padding included."""

    @property
    def length(self) -> int: ...
    @property
    def held(self) -> int: ...

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """(B or 1, n) int64: the positions of this device's tokens in the sequence."""

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

        mask: Of the whole sequence (None: causal or full, within the window). sinks: (H,), one more score per query,
        whose value is zero.
        """

    def refuse_own_part(self, keys: int, what: str) -> None:
        """Raise UserError if so many keys are this device's shard. Attention (`what`, in words) that computes on one
        device alone calls this first."""

    def whole(self, name: str, device: torch.device) -> Tensor | None:
        """The batch's tensor of that name before sharding, on the device; None where there is none."""

    def gathered(self, part: Tensor) -> Tensor:
        """All devices' shards (B, n, ...) in the sequence's order, (B, S, ...); every device must call it."""

    def summed(self, x: Tensor) -> Tensor:
        """The differentiable sum of all devices' x; every device must call it."""

    def dealt(self, x: Tensor) -> Tensor:
        """This device's shard (B, n, ...) of x (B, S, ...)."""

    def next_labels(self, labels: Tensor) -> Tensor:
        """Labels (B, n) shifted by one within the whole sequence, so that each stands at the token that predicts it.
        The step's loss is the mean over these; every device must call it."""

    def weighted(self, loss: Tensor) -> Tensor:
        """The loss weighted as mean_over_context says; the strategy then does not weight it again."""


# Global to the process, not to a thread: recomputation in the backward runs on autograd's own threads.
_active: SpreadSequence | None = None


def spread_sequence() -> SpreadSequence | None:
    """The active sharded sequence; None where rows are whole on their device."""
    return _active


@contextmanager
def spread_over(sequence: SpreadSequence | None) -> Iterator[None]:
    """Make this sequence the active one within the context."""
    global _active
    before, _active = _active, sequence
    try:
        yield
    finally:
        _active = before


def whole(batch: Any, name: str) -> Tensor:
    """batch[name] before the strategy sharded it, (B, S, ...), from which masks are made.

        mask = masks.document(whole(batch, "documents"), causal=True)

    Without context parallelism it is batch[name] itself.
    """
    found = None if _active is None else _active.whole(name, batch[name].device)
    return batch[name] if found is None else found


def mean_over_context(loss: Tensor) -> Tensor:
    """A mean over this rank's labels, weighted so that the mean over ranks is the mean over all labels.

    The strategy weights what a step returns, passes to manual_backward or logs with sync_dist=True by itself. Call this
    only in a step that computes something else from its mean. A step that only logs the result must return the same
    loss tensor that it passed in, not a copy. Without context parallelism it is the loss itself.
    """
    return loss if _active is None else _active.weighted(loss)


class PackedSequences(NamedTuple):
    """Sequences packed into one row, for attention without our kernels, where a mask would be a T x T tensor.

    lengths: Of the sequences, in their order in the row. Tokens after them belong to none.
    """

    lengths: tuple[int, ...]

    def attend(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """attention(q, k, v) for each sequence in turn: q (1, T, H, D), k and v (1, T, K, D) -> (1, T, H, D).

        Tokens of no sequence give 0. At most one sequence's score matrix is stored at a time.
        """
        sizes = [length for length in self.lengths if length]
        used = sum(sizes)
        parts = zip(*(x[:, :used].split(sizes, dim=1) for x in (q, k, v)), strict=True) if sizes else ()
        rows = [attention(*part) for part in parts]
        rows.append(q.new_zeros(q.shape[0], q.shape[1] - used, *q.shape[2:]))
        return torch.cat(rows, dim=1)


class LayerCache:
    """Keys and values of one layer, in memory for `context` tokens that the first append allocates."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v (B, S, K, D); returns all keys and values so far (B, length, K, D), views into the cache.

        Not differentiable: use it under torch.no_grad(). UserError: more tokens than the cache holds.
        """
        start, end = self.length, self.length + k.shape[1]
        if end > self.context:
            raise UserError(f"{end} tokens for a cache of {self.context}: expected at most {self.context} tokens.")
        if self._keys is None or self._values is None:
            shape = (k.shape[0], self.context, *k.shape[2:])
            self._keys, self._values = k.new_empty(shape), v.new_empty(shape)
        self._keys[:, start:end] = k
        self._values[:, start:end] = v
        self.length = end
        return self._keys[:, :end], self._values[:, :end]


class KeyValueCache:
    """One LayerCache per layer. Pass it to every call of a model's forward, with only the new tokens each time."""

    def __init__(self, layers: int, context: int) -> None:
        self.layers = [LayerCache(context) for _ in range(layers)]

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.layers[0].length

    def clear(self) -> None:
        """Drop every token; the memory is reused for the next ones (of the same batch size, dtype and device)."""
        for layer in self.layers:
            layer.length = 0


def next_positions(tokens: int, cache: KeyValueCache | LayerCache | None, device: torch.device) -> Tensor:
    """Default positions of the next tokens, (1, S) int64, continued from the cache.

    In a sharded sequence they are the positions of this device's tokens, (B or 1, n).
    """
    spread = spread_sequence()
    if spread is not None and cache is None:
        return spread.positions(tokens, device)
    start = cache.length if cache is not None else 0
    return torch.arange(start, start + tokens, device=device)[None]
