"""Baselines of PyTorch: attention written out, SDPA with one backend at a time,
varlen_attn and FlexAttention.

B batch, S sequence (Sq queries, Sk keys), H query heads, K key/value heads, D head dimension, T
packed tokens, n blocks a side.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtrain_recipes.attention_benchmark.baselines.base import Attend, AttentionBaseline, first
from flashtrain_recipes.attention_benchmark.cases import BLOCK_SIZE, Case
from flashtrain_recipes.attention_benchmark.inputs import Context, Inputs, alibi_slopes
from flashtrain_recipes.attention_benchmark.settings import PACKED

_ON_CPU = ("FLASH_ATTENTION", "MATH")  # SDPA's backends


class Standard(AttentionBaseline):
    """Standard attention: two matrix products with a softmax between them, as
    separate operations."""

    name, title = "standard", "standard attention"

    def attend(self, case: Case, context: Context) -> Attend:
        hidden = None if context.dense is None else ~context.dense
        group = case.heads // case.kv_heads

        def attention(inputs: Inputs) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
            if group > 1:
                k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            scores = (q @ k.transpose(-2, -1)) * case.scale
            if hidden is not None:
                scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
            return (torch.softmax(scores, dim=-1) @ v).transpose(1, 2)

        return attention


class Sdpa(AttentionBaseline):
    """torch's scaled_dot_product_attention with one backend.

    Args:
        backend: a name of torch.nn.attention.SDPBackend.
        matrices: whether masks other than full and causal, and ALiBi, are passed as matrices; if
            not, they are refused.
    """

    def __init__(self, name: str, title: str, backend: str, *, matrices: bool) -> None:
        self.name, self.title, self.backend, self.matrices = name, title, backend, matrices
        self.supports = ("dropout", "ALiBi", "bias", "bias gradient") if matrices else ("dropout",)

    def missing(self, device: torch.device) -> str | None:
        return (
            "needs an NVIDIA GPU" if device.type == "cpu" and self.backend not in _ON_CPU else None
        )

    def refuses(self, case: Case) -> str | None:
        if case.value_dim and self.backend == "FLASH_ATTENTION":
            return "values need the queries' head dimension"
        known = self.matrices or _known_by_name(case)
        return super().refuses(case) if known else "takes no mask besides causal"

    def attend(self, case: Case, context: Context) -> Attend:
        backend = getattr(SDPBackend, self.backend)
        by_name = _known_by_name(case)
        mask = (
            _additive(case, context)
            if "ALiBi" in case.features
            else (None if by_name else context.dense)
        )
        options: dict[str, Any] = {
            "dropout_p": case.dropout,
            "is_causal": case.kind == "causal" and mask is None,
            "scale": case.scale,
            "enable_gqa": case.heads != case.kv_heads,
        }

        def attention(inputs: Inputs) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
            added = mask if inputs.bias is None else inputs.bias
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q, k, v, attn_mask=added, **options
                ).transpose(1, 2)

        return attention


def _known_by_name(case: Case) -> bool:
    # no mask needs to be given; torch aligns causal masks top-left
    return case.kind == "full" or (case.kind == "causal" and case.seqlen_q == case.seqlen_k)


def _additive(case: Case, context: Context) -> Tensor:
    """ALiBi and the mask as what is added to the scores, (1, H, Sq, Sk) in the inputs' dtype."""
    slopes = alibi_slopes(case.heads, context.device)
    positions = torch.arange(case.seqlen_k, device=context.device, dtype=torch.float32)
    distance = (positions[-case.seqlen_q :, None] - positions).abs_()
    whole = torch.empty(
        1, case.heads, case.seqlen_q, case.seqlen_k, device=context.device, dtype=case.dtype
    )
    for head in range(case.heads):  # one head at a time: in float32 all of them would not fit
        added = distance * -slopes[head]
        whole[0, head] = (
            added if context.dense is None else added.masked_fill_(~context.dense, -torch.inf)
        )
    return whole


class VarlenAttn(AttentionBaseline):
    """torch's varlen_attn: FlashAttention-2 with cu_seqlens. It is measured on
    masks with documents only."""

    name, title = "varlen-attn", "torch varlen_attn"

    def missing(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "needs an NVIDIA GPU"

    def applies(self, case: Case) -> bool:
        return case.kind in PACKED

    def attend(self, case: Case, context: Context) -> Attend:
        from torch.nn.attention.varlen import varlen_attn

        options: dict[str, Any] = {
            "scale": case.scale,
            "window_size": (-1, 0 if case.mask_name.causal else -1),
        }
        if case.heads != case.kv_heads:
            options["enable_gqa"] = True
        bounds, longest = context.cu_seqlens, max(case.documents)

        def attention(inputs: Inputs) -> Tensor:
            q, k, v = (x.flatten(0, 1) for x in (inputs.q, inputs.k, inputs.v))
            out = first(varlen_attn(q, k, v, bounds, bounds, longest, longest, **options))
            return out.view_as(inputs.dout)

        return attention


class Flex(AttentionBaseline):
    """torch's FlexAttention, compiled for each case's exact shape, which is its fastest form."""

    name, title = "flex", "FlexAttention"
    supports = ("softcap", "ALiBi", "bias", "bias gradient")

    def missing(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "measured on GPUs only: on a CPU torch compiles it without a backward"
        return None if importlib.util.find_spec("triton") else "needs triton"

    def attend(self, case: Case, context: Context) -> Attend:
        from torch.nn.attention.flex_attention import flex_attention

        compiled = fresh_compile(flex_attention)
        block_mask = make_block_mask(case, context)
        grouped = case.heads != case.kv_heads
        # One function for all calls, or each might compile anew.
        made: list[Callable[..., Tensor] | None] = []

        def attention(inputs: Inputs) -> Tensor:
            if not made:
                made.append(score_function(case, inputs))
            q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
            out = compiled(
                q,
                k,
                v,
                score_mod=made[0],
                block_mask=block_mask,
                scale=case.scale,
                enable_gqa=grouped,
            )
            return out.transpose(1, 2)

        return attention

    def plan(self, case: Case, context: Context) -> Callable[[], object] | None:
        return None if case.kind == "full" else lambda: make_block_mask(case, context)


def make_block_mask(case: Case, context: Context) -> Any:
    """Return the case's mask as a BlockMask of FlexAttention; None for full attention."""
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    if case.kind == "full":
        return None
    rule = context.rule
    if case.is_block_sparse:
        table = context.table
        counts = table.sum(-1, dtype=torch.int32)[None]
        indices = (
            table.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)[None]
        )
        none, nowhere = torch.zeros_like(counts), torch.zeros_like(indices)
        return BlockMask.from_kv_blocks(
            none,
            nowhere,
            counts,
            indices,
            BLOCK_SIZE=BLOCK_SIZE,
            mask_mod=lambda b, h, q, k: rule(h, q, k),
        )
    lengths = (case.seqlen_q, case.seqlen_k)
    return create_block_mask(
        lambda b, h, q, k: rule(h, q, k), None, None, *lengths, device=context.device
    )


def score_function(case: Case, inputs: Inputs) -> Callable[..., Tensor] | None:
    """Return the case's softcap, ALiBi or bias as a score_mod of FlexAttention; None
    for a case without them."""
    if case.softcap:
        bound = case.softcap
        return lambda score, b, h, q, k: bound * torch.tanh(score / bound)
    if inputs.slopes is not None:
        slopes = inputs.slopes
        offset = case.seqlen_k - case.seqlen_q
        return lambda score, b, h, q, k: score - slopes[h] * (q + offset - k).abs()
    if inputs.bias is not None:
        bias = inputs.bias[0]
        return lambda score, b, h, q, k: score + bias[h, q, k]
    return None


def fresh_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Clear torch.compile's caches, and return the function compiled for exact shapes."""
    import torch._functorch.config as functorch

    torch.compiler.reset()  # or torch would, after many cases, run it uncompiled
    functorch.donated_buffer = False  # a backward that is launched again and again keeps its graph
    return torch.compile(function, dynamic=False)
