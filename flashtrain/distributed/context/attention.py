"""Exact, differentiable attention over a sequence that is sharded among ranks.

    out = context_attention(q, k, v, layout=layout, group=ContextGroup(), causal=True, way="ring")

B batch, S sequence, n tokens a rank holds, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashtrain.distributed.context.exchange import ContextGroup
from flashtrain.distributed.context.gather import GatherKeys, GatherSeen
from flashtrain.distributed.context.heads import HeadsAndRings
from flashtrain.distributed.context.layout import Layout
from flashtrain.distributed.context.local_attention import Part, Scores, Way, check_whole, numbered, planned
from flashtrain.distributed.context.ways import ALL_GATHER, AUTO, Choice, choose_for
from flashtrain.errors import UserError
from flashtrain.models.memory_savings import keep_output_of
from flashtrain_kernels import Documents, Mask, masks


class SharedAttention:
    """Attention under one mask by one context-parallel method, made once per batch and shared by layers.

    `choice` is the method, with the reason for it.
    """

    def __init__(
        self,
        mask: Mask,
        layout: Layout,
        group: ContextGroup,
        q: Tensor,
        k: Tensor,
        *,
        way: str = AUTO,
        dropout: bool,
        softcap: bool = False,
    ) -> None:
        if layout.degree != group.size:
            raise UserError(f"layout for {layout.degree} ranks, but the group has {group.size} ranks.")
        check_whole(mask, layout.seqlen)
        batch, held, heads, head_dim = q.shape
        chosen = choose_for(
            mask, layout, way, dropout=dropout, heads=heads, kv_heads=k.shape[2], head_dim=head_dim,
            held=batch * held, bytes_each=q.element_size(),
        )  # fmt: skip
        self.choice: Choice = chosen.choice
        # Queries of later batches may see more keys and need another method. Its groups are made at the first batch,
        # because all ranks of the job must make them together.
        group.parts(chosen.usual.heads_degree)
        self.held = held
        self.group = group
        if dropout:
            mask = numbered(mask, batch)

        def plan(part: Part) -> Part:
            return planned(part, head_dim, q.dtype, rich=dropout, softcap=softcap)

        self.way: Way
        if chosen.needed is not None:
            self.way = GatherSeen(layout, group, mask, plan, chosen.needed)
        elif self.choice.way == ALL_GATHER:
            self.way = GatherKeys(layout, group, mask, plan)
        else:
            self.way = HeadsAndRings(layout, group, self.choice.heads_degree, mask, plan, dropout=dropout)
        self.number = next(_numbers)
        _prepared[self.number] = self

    @torch.compiler.disable
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        dropout_p: float = 0.0,
        dropout_seed: int | Tensor | None = None,
    ) -> Tensor:
        """q (B, n, H, D), k and v (B, n, K, D) of this rank -> (B, n, H, D); differentiable. See context_attention."""
        if q.shape[1] != self.held:
            raise UserError(f"q has {q.shape[1]} tokens, expected {self.held}, this rank's part of the layout.")
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        seed = self._seed(dropout_seed, q.device) if dropout_p > 0 else None
        return _Shared.apply(q, k, v, sinks, seed, self, scale, softcap, dropout_p)

    def _seed(self, seed: int | Tensor | None, device: torch.device) -> Tensor:
        """(1,) int64; a drawn seed is the first rank's on all ranks."""
        if isinstance(seed, Tensor):
            return seed.reshape(-1)[:1]
        if seed is not None:
            return torch.full((1,), seed, dtype=torch.int64, device=device)
        drawn = torch.randint(0, 2**63 - 1, (1,), device=device, dtype=torch.int64)
        dist.broadcast(drawn, group=self.group.group, group_src=0)
        return drawn


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    group: ContextGroup,
    mask: Mask | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    documents: Documents | Tensor | None = None,
    way: str = AUTO,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
) -> Tensor:
    """flash_attn_func's attention of a whole sequence, of which each rank of the group holds its part of the layout.

    Every rank must make the same call. Partial results are summed in at least float32. Layers with the same mask can
    share a `SharedAttention`, which this function makes at each call.

    Args:
        q: (B, n, H, D), this rank's tokens, n = layout.held.
        k, v: (B, n, K, D).
        layout: which rank holds which tokens.
        group: the ranks that share the sequence.
        mask: of the whole sequence, in its order (flashtrain_kernels.masks).
        causal, window, documents: instead of a mask, and also of the whole sequence; window is (left, right).
        way: the context-parallel method (ways.py); "auto" chooses.
        softmax_scale: None: 1 / sqrt(D).
        softcap: scores become softcap * tanh(score / softcap); 0: none.
        sinks: (H,), one more score in every row, without a value (gpt-oss). Sum its gradient over the ranks.
        dropout_p: drops the same weights as one process with the same seed.
        dropout_seed: the same on all ranks; None: drawn by the first rank.

    Returns:
        (B, n, H, D), with gradients for q, k and v; padding tokens give 0 and get no gradient.

    Raises:
        UserError: a method that does not fit the number of heads, or sizes that do not match.
    """
    whole = whole_mask(layout.seqlen, q.device, mask=mask, causal=causal, window=window, documents=documents)
    shared = SharedAttention(whole, layout, group, q, k, way=way, dropout=dropout_p > 0, softcap=softcap > 0)
    return shared(
        q, k, v, softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, dropout_p=dropout_p,
        dropout_seed=dropout_seed,
    )  # fmt: skip


def whole_mask(
    seqlen: int,
    device: torch.device | str,
    *,
    mask: Mask | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    documents: Documents | Tensor | None = None,
) -> Mask:
    """The mask itself, or the one of causal, window and documents. Raises UserError if both are given."""
    described = causal or tuple(window) != (-1, -1) or documents is not None
    if mask is not None:
        if described:
            raise UserError("mask= cannot be combined with causal=, window= or documents=. Give only the mask.")
        return mask
    left, right = window
    return masks.sliding_window(seqlen, (left, 0 if causal else right), documents=documents, device=device)


# An operator's arguments are tensors and numbers: it finds its SharedAttention by number.
_numbers = itertools.count()
_prepared: weakref.WeakValueDictionary[int, SharedAttention] = weakref.WeakValueDictionary()

torch.library.define(
    "flashtrain::context_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? seed, int number, float scale, float softcap, float dropout)"
    " -> (Tensor, Tensor)",
)
CONTEXT_ATTENTION = torch.ops.flashtrain.context_attention.default


@torch.library.impl("flashtrain::context_attention", ("cpu", "cuda"))
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    seed: Tensor | None,
    number: int,
    scale: float,
    softcap: float,
    dropout: float,
) -> Any:
    return _prepared[number].way.forward(q, k, v, Scores(scale, dropout, seed, softcap, sinks))


# One operator computes and communicates: selective checkpointing saves its outputs and repeats neither.
keep_output_of(CONTEXT_ATTENTION)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        seed: Tensor | None,
        shared: SharedAttention,
        scale: float,
        softcap: float,
        dropout: float,
    ) -> Tensor:
        out, lse = CONTEXT_ATTENTION(q, k, v, sinks, seed, shared.number, scale, softcap, dropout)
        ctx.save_for_backward(q, k, v, out, lse, sinks, seed)
        ctx.shared, ctx.options = shared, (scale, softcap, dropout)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple:
        q, k, v, out, lse, sinks, seed = ctx.saved_tensors
        scale, softcap, dropout = ctx.options
        to_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=lse.dtype)
        scores = Scores(scale, dropout, seed, softcap, sinks, to_sinks)
        gradients = ctx.shared.way.backward(dout, q, k, v, out, lse, scores)
        return (*gradients, None if to_sinks is None else to_sinks.to(sinks.dtype), *(None,) * 5)
