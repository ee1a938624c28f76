"""torch's own attention on packed sequences, torch.nn.attention.varlen: FlashAttention-2 behind cu_seqlens.

B batch, S sequence, T packed tokens.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import torch
from torch import Tensor

from flashtrain_recipes.attention_benchmark.case import Case
from flashtrain_recipes.attention_benchmark.inputs import Context, Inputs
from flashtrain_recipes.attention_benchmark.peers.base import Attend, Peer, first

PACKED_KINDS = ("document", "causal-document", "varlen", "causal-varlen")


class VarlenAttn(Peer):
    """varlen_attn, on documents only."""

    name, title = "varlen-attn", "torch varlen_attn"

    def missing(self, device: torch.device) -> str | None:
        if importlib.util.find_spec("torch.nn.attention.varlen") is None:
            return f"torch {torch.__version__} has no torch.nn.attention.varlen"
        return None if device.type == "cuda" else "needs an NVIDIA GPU"

    def applies(self, case: Case) -> bool:
        return case.kind in PACKED_KINDS

    def refuses(self, case: Case) -> str | None:
        if case.features or case.dropout:
            return "no softcap, ALiBi, bias or dropout"
        return None

    def attend(self, case: Case, context: Context) -> Attend:
        from torch.nn.attention.varlen import varlen_attn

        options = causal_option(inspect.signature(varlen_attn).parameters, case.mask_name.causal)
        if case.heads != case.kv_heads and "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        bounds, longest = context.cu_seqlens, context.longest

        def attention(inputs: Inputs) -> Tensor:
            q, k, v = (x.flatten(0, 1) for x in (inputs.q, inputs.k, inputs.v))
            out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=case.scale, **options)
            return first(out).view_as(inputs.q)

        return attention


def causal_option(parameters: Any, causal: bool) -> dict[str, Any]:
    """How varlen_attn is told: by a window in newer versions of torch, by is_causal in older ones."""
    if "window_size" in parameters:
        return {"window_size": (-1, 0 if causal else -1)}
    return {"is_causal": causal}
