"""The interface by which models compute on sequences that are sharded over devices
(context parallelism).

A model computes on the tokens that it is given. Attention, default positions and labels need the
whole sequence: where a sharded sequence is active (flashtrain.distributed.context provides one),
models use its methods.

Shapes: B batch, S sequence, n tokens of a row on this device (padding included), H query heads, K
key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from flashtrain.models.key_value_cache import KeyValueCache, LayerCache
from flashtrain_kernels import Mask
from flashtrain_kernels.recurrences import Rows


class ShardedSequence(Protocol):
    """A batch whose sequences are sharded over devices, as models see it on one device."""

    # The labels of the whole sequences; with several groups of devices, the mean over them.
    label_count: Tensor
    tokens: int  # of the whole micro-batch, over all its rows and devices

    @property
    def length(self) -> int:
        """The number of tokens of a sequence, S."""

    @property
    def held(self) -> int:
        """The number of a sequence's tokens on this device, n."""

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Return the positions in the sequence of this device's tokens, (B or 1, n)
        int64; `tokens` must be n."""

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
        """Compute the attention of this device's queries to the whole sequence; other
        arguments as flash_attn_func's.

        Args:
            q: This device's queries, (B, n, H, D).
            k: This device's keys, (B, n, K, D).
            v: This device's values, (B, n, K, D).
            mask: The mask of the whole sequence (None: causal or full, within the window).
            sinks: (H,), one more score per query, whose value is zero.

        Returns:
            The attention's output, (B, n, H, D).
        """

    def refuse_own_part(self, keys: int, what: str) -> None:
        """Raise UserError if an attention would see only this device's shard of the sequence.

        Attention functions that compute on one device alone call this method first.

        Args:
            keys: The number of keys that the attention is called with; as many as the
                shard has are an error.
            what: The attention, in words, for the message.
        """

    def whole(self, name: str, device: torch.device) -> Tensor | None:
        """Return the batch's tensor of this name as it was before sharding, on `device`;
        None where there is none."""

    def gathered(self, part: Tensor) -> Tensor:
        """Gather all devices' shards (B, n, ...) in the sequence's order (B, S, ...);
        every device must call it."""

    def rows(self, positions: Tensor, whole: Tensor) -> Rows:
        """Return the documents within which recurrences and convolutions compute, over the borders
        of devices; every device must call it.

        Args:
            positions: Of this device's tokens, (B, n).
            whole: Of all tokens, (B, S).
        """

    def summed(self, x: Tensor) -> Tensor:
        """Sum the devices' tensors x, differentiably; every device must call it."""

    def batch_mean(self, x: Tensor) -> Tensor:
        """Return the mean over all tokens of the micro-batch of x, a scalar that is the mean over
        this sequence's tokens; every device must call it."""

    def shard(self, x: Tensor) -> Tensor:
        """Return this device's shard (B, n, ...) of x (B, S, ...), with 0 for padding."""

    def next_labels(self, labels: Tensor) -> Tensor:
        """Shift labels (B, n) by one within the whole sequence, so that each stands at the
        token that predicts it.

        The step's loss is the mean over these labels; every device must call this method.
        """

    def weighted(self, loss: Tensor) -> Tensor:
        """Return the loss, weighted as in mean_over_context; the strategy then
        does not weight it again."""


# Global to the process, not to a thread: recomputation in the backward runs on
# autograd's own threads.
_active: ShardedSequence | None = None


def sharded_sequence() -> ShardedSequence | None:
    """Return the active sharded sequence; None where sequences are whole on their device."""
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
    """Return the tensor batch[name] as it was before the strategy sharded it, for making masks.

        mask = masks.document(whole(batch, "documents"), causal=True)

    Args:
        batch: A mapping from names to tensors, sharded or not.
        name: The tensor's name.

    Returns:
        The whole tensor, (B, S, ...); without context parallelism batch[name] itself.
    """
    found = None if _active is None else _active.whole(name, batch[name].device)
    return batch[name] if found is None else found


def mean_over_context(loss: Tensor) -> Tensor:
    """Multiply a mean over this rank's labels by the rank's share of all labels, so that
    the mean of the results over ranks is the mean over all labels.

    The strategy calls this itself for the loss that a training step returns, passes to
    manual_backward or logs with sync_dist=True. Call it only where a step uses its mean loss in
    another way. A step that logs this function's result returns the loss itself, not the result
    and not a copy, so that it is weighted once.

    Args:
        loss: A scalar, the mean over this rank's labels.

    Returns:
        A scalar; without context parallelism the loss itself.
    """
    return loss if _active is None else _active.weighted(loss)


def next_positions(
    tokens: int, cache: KeyValueCache | LayerCache | None, device: torch.device
) -> Tensor:
    """Return the default positions of the next tokens, continued from a cache.

    Args:
        tokens: The number of tokens on this device.
        cache: The cache of the tokens before them (None: there are none).
        device: The result's device.

    Returns:
        Positions (1, S) int64; in a sharded sequence those of this device's tokens, (B or 1, n).
    """
    sequence = sharded_sequence()
    if sequence is not None and cache is None:
        return sequence.positions(tokens, device)
    start = cache.length if cache is not None else 0
    return torch.arange(start, start + tokens, device=device)[None]
