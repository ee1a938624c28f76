"""Standard attention, which writes out the S x S matrix: the FlashAttention papers' baseline.

B batch, S sequence, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtrain_recipes.attention_benchmark.case import Case
from flashtrain_recipes.attention_benchmark.inputs import Context, Inputs
from flashtrain_recipes.attention_benchmark.peers.base import Attend, Peer


class Standard(Peer):
    """Two matrix products with a softmax between them, each an operation of its own."""

    name, title = "standard", "standard attention"

    def attend(self, case: Case, context: Context) -> Attend:
        hidden = None if context.dense is None else ~context.dense
        group = case.heads // case.kv_heads

        def attention(inputs: Inputs) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
            if group > 1:
                k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            scores = (q @ k.transpose(-2, -1)) * case.scale
            if case.softcap:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            if inputs.slopes is not None:
                scores = scores - (inputs.slopes[:, None, None] * context.distance).to(scores.dtype)
            if inputs.bias is not None:
                scores = scores + inputs.bias
            if hidden is not None:
                scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
            weights = torch.softmax(scores, dim=-1)
            if case.dropout:
                weights = F.dropout(weights, case.dropout)
            return (weights @ v).transpose(1, 2)

        return attention
