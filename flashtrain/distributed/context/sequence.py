"""The part of a batch that this rank holds, and what its model must know of the rest.

B batch, S sequence, n tokens a rank holds, R ranks, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashtrain.distributed.context.attention import SharedAttention, whole_mask
from flashtrain.distributed.context.group import ContextGroup
from flashtrain.distributed.context.layout import Layout
from flashtrain.distributed.context.ways import AUTO
from flashtrain.errors import UserError
from flashtrain.models.spread import spread_sequence
from flashtrain_kernels import Mask

MASKS_KEPT = 4  # made ready at a time: layers of one model rarely use more


class ContextSequence:
    """A batch spread by a layout; what flashtrain.models ask for (models/spread.py).

    whole: the batch's tensors (B, S, ...) by name, as they were before. counted: labels that count, on this rank and
    on all R. tokens: of the whole batch, B * S. weight: what this rank's mean loss is multiplied by, so that the mean
    over the R ranks is the mean over all labels; where other ranks hold other samples, whoever knows of them replaces
    it.
    """

    def __init__(
        self,
        layout: Layout,
        group: ContextGroup,
        *,
        way: str = AUTO,
        whole: Mapping[str, Tensor] | None = None,
        counted: tuple[int, int] = (1, 1),
        tokens: int = 0,
    ) -> None:
        self.layout = layout
        self.group = group
        self.way = way
        self.counted = counted
        self.tokens = tokens
        self.weight: float | Tensor = group.size * counted[0] / max(1, counted[1])
        self.refuses_own_part = True  # ... a user may say that attention to a device's own part is meant
        self.weighted = False  # whether the step's loss was multiplied already
        self.unweighted: Tensor | None = None  # ... what of: a step that returns this one returns it as it was
        self.explanation: str | None = None
        self._whole = dict(whole or {})
        self._positions: Tensor | None = None
        self._ready: dict[tuple, tuple[Any, SharedAttention]] = {}

    @torch.compiler.disable
    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """(Bl, n) int64: where this rank's tokens stand in the sequence. UserError: another number of tokens."""
        self._check(tokens)
        if self._positions is None or self._positions.device != device:
            self._positions = self.layout.positions(self.group.rank).to(device)
        return self._positions

    @torch.compiler.disable
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, mask: Mask | None, dropout: float
    ) -> Tensor:
        """See models/spread.py; the same mask is made ready once for all layers."""
        self._check(q.shape[1])
        # A mask is known by its tensor, which is kept, so that no other takes its place in memory.
        held = None if mask is None else mask.queries
        key = (id(held), causal and mask is None, q.shape, k.shape, q.dtype, dropout > 0)
        if key not in self._ready:
            made = whole_mask(self.layout.seqlen, q.device, mask=mask, causal=causal and mask is None)
            shared = SharedAttention(made, self.layout, self.group, q, k, way=self.way, dropout=dropout > 0)
            while len(self._ready) >= MASKS_KEPT:
                del self._ready[next(iter(self._ready))]
            self._ready[key] = held, shared
            self.explanation = shared.choice.reason
        return self._ready[key][1](q, k, v, softmax_scale=scale, dropout_p=dropout)

    def whole(self, name: str, device: torch.device) -> Tensor | None:
        """The whole tensor of that name, on the device; None where the batch had none."""
        if name not in self._whole:
            return None
        self._whole[name] = self._whole[name].to(device, non_blocking=True)
        return self._whole[name]

    def is_own_part(self, tokens: int) -> bool:
        """Whether so many tokens are the ones that this rank holds: of a row (one may be cut off or added), of all."""
        held, rows = self.layout.held, max(1, self.tokens // self.layout.seqlen)
        return abs(tokens - held) <= 1 or tokens == rows * held

    def refuse_own_part(self, keys: int, what: str) -> None:
        """See models/spread.py."""
        if self.refuses_own_part and self.layout.degree > 1 and self.is_own_part(keys):
            raise UserError(
                f"{what} of {keys} keys under context parallelism, where {self.layout.degree} devices hold "
                f"{self.layout.held} of a sequence's {self.layout.seqlen} tokens each: a token would see its own "
                "device's part alone. Possible: flashtrain.Attention in its place, another strategy (fsdp, ddp), or "
                "ContextParallelStrategy(check_attention=False) where this is meant."
            )

    def _check(self, tokens: int) -> None:
        if tokens != self.layout.held:
            raise UserError(
                f"{tokens} tokens on a rank that holds {self.layout.held} of {self.layout.seqlen}. Possible: the batch "
                "as the strategy dealt it, not cut or joined (labels are shifted before a batch is dealt)."
            )


def current() -> ContextSequence | None:
    """The spread sequence of this step; None outside of a step of ContextParallelStrategy."""
    sequence = spread_sequence()
    return sequence if isinstance(sequence, ContextSequence) else None


def whole(batch: Any, name: str) -> Tensor:
    """batch[name] as it was before the strategy dealt it to the ranks, (B, S, ...): what masks are made from.

        mask = masks.document(whole(batch, "documents"), causal=True)

    Outside of context parallelism it is batch[name] itself.
    """
    sequence = current()
    found = None if sequence is None else sequence.whole(name, batch[name].device)
    return batch[name] if found is None else found


def mean_over_context(loss: Tensor) -> Tensor:
    """A mean over this rank's labels, weighted so that the mean of all ranks' results is that over all labels.

    For a step that logs its loss with sync_dist=True, or that calls manual_backward; the strategy does it to what
    training_step returns unless that was made with this. Outside of context parallelism it is the loss itself.
    """
    sequence = current()
    if sequence is None:
        return loss
    sequence.weighted, sequence.unweighted = True, loss
    return loss * sequence.weight
