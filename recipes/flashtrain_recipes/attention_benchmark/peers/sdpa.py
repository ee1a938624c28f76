"""torch.nn.functional.scaled_dot_product_attention, one backend at a time.

B batch, S sequence, H heads, D head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtrain_recipes.attention_benchmark.case import Case
from flashtrain_recipes.attention_benchmark.inputs import Context, Inputs, alibi_slopes
from flashtrain_recipes.attention_benchmark.peers.base import Attend, Peer

_ON_CPU = ("FLASH_ATTENTION", "MATH")


class Sdpa(Peer):
    """One backend of SDPA. Masks that it does not know by name are given as a matrix, and so is ALiBi."""

    def __init__(self, name: str, title: str, backend: str) -> None:
        self.name, self.title, self.backend = name, title, backend

    def missing(self, device: torch.device) -> str | None:
        if not hasattr(SDPBackend, self.backend):
            return f"torch {torch.__version__} has no such backend"
        if device.type == "cpu" and self.backend not in _ON_CPU:
            return "needs an NVIDIA GPU"
        return None

    def refuses(self, case: Case) -> str | None:
        if case.softcap:
            return "no softcap"
        if self.backend == "FLASH_ATTENTION" and (case.alibi or case.bias or not _known_by_name(case)):
            return "takes no mask or bias besides causal"
        return None

    def attend(self, case: Case, context: Context) -> Attend:
        backend = getattr(SDPBackend, self.backend)
        by_name = _known_by_name(case)
        mask = _additive(case, context) if case.alibi else (None if by_name else context.dense)
        causal = case.kind == "causal" and mask is None

        def attention(inputs: Inputs) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=inputs.bias if inputs.bias is not None else mask,
                    dropout_p=case.dropout,
                    is_causal=causal,
                    scale=case.scale,
                    enable_gqa=case.heads != case.kv_heads,
                )
            return out.transpose(1, 2)

        return attention


def _known_by_name(case: Case) -> bool:
    """Whether no mask needs to be given: full, or causal where torch's top-left alignment is ours."""
    return case.kind == "full" or (case.kind == "causal" and case.seqlen_q == case.seqlen_k)


def _additive(case: Case, context: Context) -> Tensor:
    """ALiBi and the mask as what is added to the scores: (1, H, Sq, Sk) in the inputs' dtype."""
    slopes = alibi_slopes(case.heads, context.device)
    whole = torch.empty(1, case.heads, case.seqlen_q, case.seqlen_k, device=context.device, dtype=case.dtype)
    for head in range(case.heads):  # one head at a time: in float32 all of them would not fit
        added = context.distance * -slopes[head]
        whole[0, head] = added if context.dense is None else added.masked_fill_(~context.dense, -torch.inf)
    return whole
