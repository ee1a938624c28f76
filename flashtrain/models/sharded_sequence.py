"""What a model needs of a batch whose sequences are sharded over devices (context parallelism).

A model computes on the tokens that it is given. Attention, default positions and labels need the whole sequence: where
a sharded sequence is active (flashtrain.distributed.context provides one), models use its methods.

Shapes: B batch, S sequence, n tokens of a row on this device (padding included), H query heads, K key/value heads,
D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from flashtrain.models.key_value_cache import KeyValueCache, LayerCache
from flashtrain_kernels import Mask


class ShardedSequence(Protocol):
    """A batch of sequences, each sharded over the devices."""

    @property
    def length(self) -> int:
        """The number of tokens of a sequence, S."""

    @property
    def held(self) -> int:
        """The number of a sequence's tokens on this device, n."""

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """The positions of this device's tokens in the sequence, (B or 1, n) int64."""

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
        """Compute the attention of this device's queries to the whole sequence.

        Args:
            q: (B, n, H, D).
            k: (B, n, K, D).
            v: (B, n, K, D).
            mask: Of the whole sequence (None: causal or full, within the window).
            sinks: (H,), one more score per query, whose value is zero.

        Returns:
            (B, n, H, D).
        """

    def refuse_own_part(self, keys: int, what: str) -> None:
        """Raise UserError if this many keys are this device's shard.

        Attention that computes on one device alone calls this method first.

        Args:
            keys: Number of keys of the call.
            what: The attention, in words.
        """

    def whole(self, name: str, device: torch.device) -> Tensor | None:
        """The batch's tensor of this name before sharding, on the device; None where there is none."""

    def gathered(self, part: Tensor) -> Tensor:
        """The shards (B, n, ...) of all devices, in the sequence's order (B, S, ...); every device must call it."""

    def summed(self, x: Tensor) -> Tensor:
        """The differentiable sum of the devices' tensors x; every device must call it."""

    def shard(self, x: Tensor) -> Tensor:
        """This device's shard (B, n, ...) of x (B, S, ...); 0 for padding."""

    def next_labels(self, labels: Tensor) -> Tensor:
        """Labels (B, n) shifted by one within the whole sequence, so that each stands at the token that predicts it.

        The step's loss is the mean over these labels; every device must call this method.
        """

    def weighted(self, loss: Tensor) -> Tensor:
        """The loss weighted as mean_over_context says; the strategy then does not weight it again."""


# Global to the process, not to a thread: recomputation in the backward runs on autograd's own threads.
_active: ShardedSequence | None = None


def sharded_sequence() -> ShardedSequence | None:
    """The active sharded sequence; None where sequences are whole on their device."""
    return _active


@contextmanager
def use_sharded_sequence(sequence: ShardedSequence | None) -> Iterator[None]:
    """Make this sequence the active one inside a `with` block (None: whole sequences)."""
    global _active
    before, _active = _active, sequence
    try:
        yield
    finally:
        _active = before


def whole(batch: Any, name: str) -> Tensor:
    """The tensor batch[name] as it was before the strategy sharded it, from which masks are made.

        mask = masks.document(whole(batch, "documents"), causal=True)

    Args:
        batch: A mapping from names to tensors, sharded or not.
        name: The tensor's name.

    Returns:
        (B, S, ...); without context parallelism batch[name] itself.
    """
    found = None if _active is None else _active.whole(name, batch[name].device)
    return batch[name] if found is None else found


def mean_over_context(loss: Tensor) -> Tensor:
    """Weight a mean over this rank's labels, so that the mean over ranks is the mean over all labels.

    The strategy by itself weights what a step returns, passes to manual_backward or logs with sync_dist=True. Call this
    function only in a step that computes something else from its mean. A step that only logs the result must return the
    same loss tensor that it passed in, not a copy.

    Args:
        loss: A scalar, the mean over this rank's labels.

    Returns:
        A scalar; without context parallelism the loss itself.
    """
    return loss if _active is None else _active.weighted(loss)


def next_positions(tokens: int, cache: KeyValueCache | LayerCache | None, device: torch.device) -> Tensor:
    """The default positions of the next tokens, continued from a cache.

    Args:
        tokens: Number of tokens, on this device.
        cache: The tokens before them (None: there are none).
        device: The result's device.

    Returns:
        (1, S) int64; in a sharded sequence the positions of this device's tokens, (B or 1, n).
    """
    sequence = sharded_sequence()
    if sequence is not None and cache is None:
        return sequence.positions(tokens, device)
    start = cache.length if cache is not None else 0
    return torch.arange(start, start + tokens, device=device)[None]
