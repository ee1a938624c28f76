"""A batch whose sequences are sharded among ranks, as models use it.

Shapes: B batch, Bl rows of a layout, S sequence, n tokens a rank holds, R ranks, H query heads, K
key/value heads, D head dimension.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashtrain.distributed.context.all_gather import all_gather_single, reduce_scatter_single
from flashtrain.distributed.context.attention import SharedAttention
from flashtrain.distributed.context.group import ContextGroup
from flashtrain.distributed.context.layout import Layout
from flashtrain.distributed.context.methods import AUTO
from flashtrain.distributed.context.planned_batch import Origin
from flashtrain.errors import UserError
from flashtrain.models.sharded_sequence import ShardedSequence
from flashtrain_kernels import Mask, masks
from flashtrain_kernels.loss_head import IGNORED
from flashtrain_kernels.recurrences import Rows, SharedRows

MAX_PREPARED = 4  # prepared masks in memory: layers of one model rarely use more


class ContextSequence(ShardedSequence):
    """The sharded sequences of one batch, with the methods that models call (ShardedSequence).

    Args:
        layout: which rank holds which tokens.
        group: the ranks that share the sequence.
        method: the context-parallel method.
        whole: the unsharded tensors (B, S, ...) of the batch, by name.
        counted: the numbers of labels that are not ignored, on this rank and on all R ranks.
        tokens: the number of tokens of the whole batch, B * S.
        origin: of documents that were planned over more ranks, where their tokens come from; None:
            the whole batch is sharded over the group.
    """

    def __init__(
        self,
        layout: Layout,
        group: ContextGroup,
        *,
        method: str = AUTO,
        whole: Mapping[str, Tensor] | None = None,
        counted: tuple[int, int] = (1, 1),
        tokens: int = 0,
        origin: Origin | None = None,
    ) -> None:
        self.layout = layout
        self.origin = origin
        # The ranks that share the batch, over which its labels are counted.
        self.sharing = group if origin is None else origin.group
        self.group = group
        self.method = method
        self.tokens = tokens
        # The factor for this rank's mean loss, such that the mean over ranks is the
        # mean over all labels.
        self.weight = self._weigh(*(torch.tensor(count, dtype=torch.float64) for count in counted))
        self._without_labels = counted[0] == 0
        # Whether attention to only this device's tokens is an error (check_attention).
        self.refuses_own_part = True
        self.is_weighted = False  # whether the step weighted a mean itself, even if only to log it
        # The loss that the step weighted, where that has a graph. Weakly: the graph holds this
        # sequence, and a circle through a graph is never freed, nor what else the graph holds (the
        # model, under FSDP2).
        self._unweighted: weakref.ref[Tensor] | None = None
        self._whole = dict(whole or {})
        self._positions: Tensor | None = None
        self._ready: dict[tuple, tuple[Any, SharedAttention]] = {}

    @property
    def length(self) -> int:
        return self.layout.seqlen

    @property
    def held(self) -> int:
        return self.layout.held

    @torch.compiler.disable
    def positions(self, tokens: int, device: torch.device) -> Tensor:
        self._check(tokens)
        if self._positions is None or self._positions.device != device:
            mine = self.layout.tokens[:, self.group.rank].clamp(min=0)
            mine = mine if self.origin is None else self.origin.columns.gather(1, mine)
            self._positions = mine.to(device)
        return self._positions

    @torch.compiler.disable
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        mask: Mask | None,
        dropout: float,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        **options: Any,
    ) -> Tensor:
        # The same mask is made ready once for all layers.
        self._check(q.shape[1])
        assert mask is None or window == (-1, -1)
        # The cache's key has the id of the mask's tensor; the entry holds the tensor, so that
        # no other gets this id.
        queries = None if mask is None else mask.queries
        causal = causal and mask is None
        key = (id(queries), causal, window, q.shape, k.shape, q.dtype, dropout > 0, softcap > 0)
        if key not in self._ready:
            if mask is None:
                mask = masks.sliding_window(
                    self.length, (window[0], 0 if causal else window[1]), device=q.device
                )
            shared = SharedAttention(
                mask,
                self.layout,
                self.group,
                q,
                k,
                method=self.method,
                dropout=dropout > 0,
                softcap=softcap > 0,
            )
            while len(self._ready) >= MAX_PREPARED:
                del self._ready[next(iter(self._ready))]
            self._ready[key] = queries, shared
        return self._ready[key][1](q, k, v, softcap=softcap, dropout=dropout, **options)

    def whole(self, name: str, device: torch.device) -> Tensor | None:
        if name not in self._whole:
            return None
        self._whole[name] = self._whole[name].to(device, non_blocking=True)
        return self._whole[name]

    @torch.compiler.disable
    def gathered(self, part: Tensor) -> Tensor:
        self._check(part.shape[1])
        mine = part.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.group.size)]
        dist.all_gather(parts, mine, group=self.group.group)
        return self.layout.unshard(parts)

    def rows(self, positions: Tensor, whole: Tensor) -> Rows:
        if self.group.size == 1:
            return Rows(positions)
        gather = partial(_Gathered.apply, self.group.group)
        return SharedRows(positions, whole, self.layout.tokens, self.group.rank, gather)

    @torch.compiler.disable
    def summed(self, x: Tensor) -> Tensor:
        return _Summed.apply(x, self.sharing.group)

    def batch_mean(self, x: Tensor) -> Tensor:
        if self.origin is None:
            return x
        total = x * (self.length / self.group.size / self.tokens)
        dist.all_reduce(total, group=self.sharing.group)
        return total

    @torch.compiler.disable
    def shard(self, x: Tensor) -> Tensor:
        return self.layout.shard(x, self.group.rank)

    @torch.compiler.disable
    def next_labels(self, labels: Tensor) -> Tensor:
        # The first ones are stand-ins (batch.py): this rank computes one, with weight 0.
        if self._without_labels:
            labels = labels.index_fill(
                1, torch.zeros(1, dtype=torch.int64, device=labels.device), IGNORED
            )
        whole = torch.nn.functional.pad(self.gathered(labels)[:, 1:], (0, 1), value=IGNORED)
        if self.origin is not None:  # the next token is of another document
            whole = whole.masked_fill(self.origin.ends.to(whole.device), IGNORED)
        mine = self.layout.shard(whole, self.group.rank, fill=IGNORED)
        counted, together = ((x != IGNORED).sum().double() for x in (mine, whole))
        if self.origin is not None:
            together = counted.clone()
            dist.all_reduce(together, group=self.sharing.group)
        self.weight = self._weigh(counted, together)
        return torch.cat((torch.where(counted == 0, 0, mine[:, :1]), mine[:, 1:]), 1)

    def _weigh(self, here: Tensor, together: Tensor) -> Tensor:
        """Return this rank's number of labels divided by the mean number of all devices, a scalar
        for which the host does not wait."""
        sharing = self.sharing
        ranks = sharing.size
        if sharing.data_group is not None:
            together = together.to(sharing.device, copy=True)
            dist.all_reduce(together, group=sharing.data_group)
            ranks *= dist.get_world_size(sharing.data_group)
        self.label_count = together * sharing.size / ranks
        weight = ranks * here / together.clamp(min=1)
        return weight if weight.device.type == "cpu" else weight.float()

    def weighted(self, loss: Tensor) -> Tensor:
        self.is_weighted = True
        if loss.requires_grad:
            self._unweighted = weakref.ref(loss)
        return loss * self.weight

    def has_weighted(self, loss: Any) -> bool:
        """Return whether the step weighted this loss itself (mean_over_context), not a
        mean that it only logged."""
        return self._unweighted is not None and self._unweighted() is not loss

    def refuse_own_part(self, keys: int, what: str) -> None:
        # Also without a row's last token, or with one before it.
        own = abs(keys - self.layout.held) <= 1
        if own and self.refuses_own_part and self.layout.degree > 1:
            raise UserError(
                f"{what} of {keys} keys under context parallelism, where {self.layout.degree} "
                f"devices hold {self.layout.held} of a sequence's {self.layout.seqlen} tokens "
                "each: a token would see only its own device's part. Use flashtrain.Attention "
                "instead, or another strategy (fsdp, ddp), or if this is intended "
                "ContextParallelStrategy(check_attention=False)."
            )

    def _check(self, tokens: int) -> None:
        if tokens != self.layout.held:
            raise UserError(
                f"this rank got {tokens} tokens, expected {self.layout.held} of "
                f"{self.layout.seqlen}. Do not slice or join the batch after the strategy has "
                "sharded it; shift labels beforehand."
            )


class _Summed(torch.autograd.Function):
    """Sums x over the ranks; as every rank's sum contains x, the gradient of x is the sum of all
    ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, summed = group, x.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return _Summed.forward(ctx, dout, ctx.group), None


class _Gathered(torch.autograd.Function):
    """Gathers the ranks' tensors x as (R, ...); the gradient of x is the sum of all ranks'."""

    @staticmethod
    def forward(ctx: Any, group: Any, x: Tensor) -> Tensor:
        ctx.group, size = group, dist.get_world_size(group)
        found = x.new_empty(size * x.numel())
        all_gather_single(found, x.flatten(), group=group)
        return found.view(size, *x.shape)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[None, Tensor]:
        dx = torch.empty_like(dout[0], memory_format=torch.contiguous_format)
        reduce_scatter_single(dx.view(-1), dout.flatten(), group=ctx.group)
        return None, dx
