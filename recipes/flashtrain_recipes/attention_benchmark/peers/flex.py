"""FlexAttention, compiled: torch.nn.attention.flex_attention with a block mask and, for features, a score function.

B batch, S sequence, H heads, n blocks a side.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtrain_recipes.attention_benchmark.case import BLOCK_SIZE, Case
from flashtrain_recipes.attention_benchmark.inputs import Context, Inputs
from flashtrain_recipes.attention_benchmark.peers.base import Attend, Peer


class Flex(Peer):
    """Compiled for each case's exact shape, as it is fastest; compiling is not timed."""

    name, title = "flex", "FlexAttention"

    def missing(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "measured on GPUs only: on a CPU torch compiles it without a backward"
        return None if importlib.util.find_spec("triton") else "needs triton"

    def refuses(self, case: Case) -> str | None:
        return "no dropout" if case.dropout else None

    def attend(self, case: Case, context: Context) -> Attend:
        from torch.nn.attention.flex_attention import flex_attention

        compiled = _fresh_compile(flex_attention)
        block_mask = make_block_mask(case, context)
        grouped = case.heads != case.kv_heads
        made: list[Callable[..., Tensor] | None] = []  # one function for all calls, or each might compile anew

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
    """The case's mask as FlexAttention's BlockMask; None where every pair is visible."""
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    shared = context.shared
    if shared is None:
        return None
    if isinstance(shared, Tensor):
        counts = shared.sum(-1, dtype=torch.int32)[None]
        indices = shared.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)[None]
        table = shared
        return BlockMask.from_kv_blocks(
            torch.zeros_like(counts),
            torch.zeros_like(indices),
            counts,
            indices,
            BLOCK_SIZE=BLOCK_SIZE,
            mask_mod=lambda b, h, q, k: table[h, q // BLOCK_SIZE, k // BLOCK_SIZE],
        )
    rule = shared
    return create_block_mask(
        lambda b, h, q, k: rule(q, k), None, None, case.seqlen_q, case.seqlen_k, device=context.device
    )


def score_function(case: Case, inputs: Inputs) -> Callable[..., Tensor] | None:
    """Softcap, ALiBi or bias as FlexAttention's score_mod; None where the case has none."""
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


def _fresh_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """flex_attention compiled anew: earlier cases' code is dropped, or torch would one day run it uncompiled."""
    import torch._functorch.config as functorch

    torch.compiler.reset()
    if hasattr(functorch, "donated_buffer"):
        functorch.donated_buffer = False  # a backward that is launched again and again keeps its graph
    return torch.compile(function, dynamic=False)
