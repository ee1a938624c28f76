"""One case: a shape, a mask and a set of features that every implementation is measured on.

B batch, S sequence (Sq queries, Sk keys), H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from flashtrain_recipes.attention_benchmark.names import BLOCK_SPARSE, WITH_DOCUMENTS, MaskName, parse_mask

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BLOCK_SIZE = 128
SOFTCAP = 30.0


@dataclass(frozen=True)
class Case:
    """What one row of a table describes, but for the implementation and the direction.

    mask: a name of names.MASKS. documents: the lengths of one row's documents, whose sum is S, for masks that have
    them. density: of a random block mask, the share of blocks that are computed. softcap: 0, or the scores' bound.
    alibi: with the usual slopes. bias: "", "bias" or "bias gradient" (its gradient is computed too), of the shape
    (1, H, Sq, Sk). plans: also measure how long making the mask takes.
    """

    batch: int
    heads: int
    seqlen_q: int
    head_dim: int
    mask: str
    kv_heads: int = 0
    seqlen_k: int = 0
    dropout: float = 0.0
    dtype_name: str = "bfloat16"
    documents: tuple[int, ...] = ()
    density: float = 1.0
    softcap: float = 0.0
    alibi: bool = False
    bias: str = ""
    plans: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "seqlen_k", self.seqlen_k or self.seqlen_q)
        if self.has_documents and sum(self.documents) != self.seqlen_q:
            raise ValueError(f"documents must add up to {self.seqlen_q} tokens, not {sum(self.documents)}")

    @cached_property
    def mask_name(self) -> MaskName:
        return parse_mask(self.mask)

    @property
    def kind(self) -> str:
        return self.mask_name.kind

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype_name]

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def has_documents(self) -> bool:
        return self.kind in WITH_DOCUMENTS

    @property
    def is_varlen(self) -> bool:
        return self.kind in ("varlen", "causal-varlen")

    @property
    def is_block_sparse(self) -> bool:
        return self.kind in BLOCK_SPARSE

    @property
    def features(self) -> str:
        """Softcap, ALiBi and bias in words; "" where the case has none."""
        parts = [f"softcap {self.softcap:g}"] if self.softcap else []
        parts += ["ALiBi"] if self.alibi else []
        return ", ".join([*parts, *([self.bias] if self.bias else [])])

    def columns(self) -> dict[str, Any]:
        """The case as the columns of a row."""
        told: dict[str, Any] = {
            "batch": self.batch,
            "seqlen_q": self.seqlen_q,
            "seqlen_k": self.seqlen_k,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "mask": self.mask,
            "dropout": self.dropout,
            "dtype": self.dtype_name,
        }
        return {**told, "features": self.features} if self.features else told

    def __str__(self) -> str:
        keys = "" if self.seqlen_k == self.seqlen_q else f" on {self.seqlen_k}"
        groups = "" if self.kv_heads == self.heads else f" ({self.kv_heads} KV)"
        extras = [self.features, f"dropout {self.dropout:g}" if self.dropout else ""]
        extras += [f"density {self.density:g}" if self.kind == "block-random" else ""]
        told = ", ".join(part for part in (self.mask, *extras) if part)
        return f"B={self.batch} H={self.heads}{groups} S={self.seqlen_q}{keys} D={self.head_dim} {told}"


def flops(case: Case, pairs: float, direction: str) -> float:
    """FLOPs of one call: 4 * D for each visible pair (two products), 2.5 times that backward (five products).

    pairs: (query, key) pairs a head computes, over one row of the batch (masks.counted_pairs).
    """
    forward = 4.0 * case.batch * case.heads * pairs * case.head_dim
    return forward if direction == "forward" else 2.5 * forward
