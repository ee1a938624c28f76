"""Exact, differentiable attention over a sequence that is sharded among ranks.

Shapes: B batch, S sequence, n tokens a rank holds, H query heads, K key/value
heads, D head dimension.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashtrain.distributed.context.all_gather import AllGather, AllGatherNeeded
from flashtrain.distributed.context.group import ContextGroup
from flashtrain.distributed.context.layout import Layout
from flashtrain.distributed.context.local_attention import Saved, Scores
from flashtrain.distributed.context.local_mask import CAUSAL, FULL, LocalMasks
from flashtrain.distributed.context.methods import ALL_GATHER, AUTO, choose_method, gather_needed
from flashtrain.distributed.context.ring import Ring
from flashtrain.distributed.context.traffic import Sizes, traffic
from flashtrain.distributed.context.ulysses import Ulysses
from flashtrain.errors import UserError
from flashtrain.models.activation_checkpointing import save_output_of
from flashtrain_kernels import Mask

# An operator's arguments are tensors and numbers: it finds its SharedAttention by number.
_numbers = itertools.count()
_prepared: weakref.WeakValueDictionary[int, SharedAttention] = weakref.WeakValueDictionary()

torch.library.define(
    "flashtrain::context_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? seed, int number, float scale, "
    "float softcap, float dropout) -> (Tensor, Tensor)",
)
CONTEXT_ATTENTION = torch.ops.flashtrain.context_attention.default
# One operator computes and communicates: selective checkpointing saves its outputs
# and repeats neither.
save_output_of(CONTEXT_ATTENTION)


class SharedAttention:
    """Attention under one mask by one context-parallel method, made once per batch
    and used by all layers.

    Args:
        mask: the mask of the whole sequence, in the sequence's order (flashtrain_kernels.masks).
        layout: which rank holds which tokens.
        group: the ranks that share the sequence.
        q, k: examples of a layer's queries (B, n, H, D) and keys (B, n, K, D), of which only
            sizes and dtype are read.
        method: the context-parallel method; "auto" chooses.
        dropout: whether the calls drop attention weights.
        softcap: whether the calls bound the scores.

    Raises:
        UserError: a method that does not fit the number of heads, or a mask that is not
            of the whole sequence.
    """

    def __init__(
        self,
        mask: Mask,
        layout: Layout,
        group: ContextGroup,
        q: Tensor,
        k: Tensor,
        *,
        method: str = AUTO,
        dropout: bool,
        softcap: bool = False,
    ) -> None:
        length = layout.seqlen
        if mask.keys is not None or mask.queries.shape[2] != length or mask.seqlen_k != length:
            raise UserError(
                f"the mask has {mask.queries.shape[2]} queries and {mask.seqlen_k} keys, expected "
                f"{length} of both: with context parallelism a mask is of the whole sequence, in "
                "its order. Make it from flashtrain.models.sharded_sequence.whole(batch, name), "
                "not from a rank's own part."
            )
        batch, held, heads, head_dim = q.shape
        # Of documents, which differ from batch to batch, the most that they can see.
        left, right = mask.band or CAUSAL
        visible = (
            length if (left, right) == FULL else left + right + 1 if min(left, right) >= 0 else 0
        )
        sizes = Sizes(
            group.size,
            heads,
            k.shape[2],
            head_dim,
            batch * held,
            q.element_size(),
            group.near,
            visible,
        )
        # The method, with the reason for it.
        self.choice, needed = choose_method(method, sizes, hybrid=not group.planned), None
        # Queries of later batches may see more keys and need another method. Its groups are made at
        # the first batch, because all ranks of the job must make them together.
        group.parts(self.choice.heads_degree)
        if not dropout:  # it draws by positions in the sequence
            self.choice, needed = gather_needed(self.choice, method, mask, layout)
        self.group = group
        local_masks = LocalMasks(mask, batch, head_dim, q.dtype, dropout=dropout, softcap=softcap)
        self.method: AllGather | Ulysses | Ring
        if group.size == 1:
            self.method = Ring(None, [local_masks.part(None, None)])
        elif needed is not None:
            self.method = AllGatherNeeded(layout, group, local_masks, needed)
        elif self.choice.method == ALL_GATHER:
            self.method = AllGather(layout, group, local_masks)
        else:
            self.method = Ulysses(layout, group, local_masks, self.choice.heads_degree)
            sent = traffic(
                sizes, self.choice.heads_degree, gathers=False, share=self.method.ring.share
            )
            self.choice = replace(self.choice, traffic=sent)
        self.number = next(_numbers)
        _prepared[self.number] = self

    @torch.compiler.disable
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Attention of this rank's queries to the whole sequence. Every rank of the group
        must make the same call.

        Partial results are summed in at least float32.

        Args:
            q: (B, n, H, D), this rank's tokens.
            k, v: (B, n, K, D).
            scale: factor of q k^T.
            softcap: scores become softcap * tanh(score / softcap); 0: none.
            sinks: (H,), one more score in every row, whose value is 0 (gpt-oss). Sum its
                gradient over the ranks.
            dropout: probability of dropping an attention weight. A single process that starts
                from the first rank's random state drops the same weights.

        Returns:
            (B, n, H, D), with gradients for q, k and v; padding tokens give 0 and get no gradient.
        """
        seed = None
        if dropout > 0:
            seed = torch.randint(0, 2**63 - 1, (1,), device=q.device, dtype=torch.int64)
            dist.broadcast(seed, group=self.group.group, group_src=0)
        return _Shared.apply(q, k, v, sinks, seed, self, scale, softcap, dropout)


@torch.library.impl("flashtrain::context_attention", ("cpu", "cuda"))
def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Any, seed: Any, number: int, *numbers: float
) -> Any:
    scale, softcap, dropout = numbers
    return _prepared[number].method.forward(q, k, v, Scores(scale, dropout, seed, softcap, sinks))


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Any,
        seed: Any,
        shared: SharedAttention,
        *numbers: float,
    ) -> Tensor:
        out, lse = CONTEXT_ATTENTION(q, k, v, sinks, seed, shared.number, *numbers)
        ctx.save_for_backward(q, k, v, out, lse, sinks, seed)
        ctx.shared, ctx.numbers = shared, numbers
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple:
        q, k, v, out, lse, sinks, seed = ctx.saved_tensors
        scale, softcap, dropout = ctx.numbers
        to_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=lse.dtype)
        scores = Scores(scale, dropout, seed, softcap, sinks, to_sinks)
        gradients = ctx.shared.method.backward(Saved(dout, q, k, v, out, lse), scores)
        return (*gradients, None if to_sinks is None else to_sinks.to(sinks.dtype), *(None,) * 5)
