"""The tensors of a case: drawn afresh, and enough sets of them that a launch does not find its inputs in the cache.

B batch, S sequence (Sq queries, Sk keys), H query heads, K key/value heads, D head dimension, T packed tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flashtrain_recipes.attention_benchmark.case import Case
from flashtrain_recipes.attention_benchmark.masks import Rule, pieces, shared_mask, starts, visible

MOST_SETS = 32


@dataclass(frozen=True)
class Inputs:
    """One set: q (B, Sq, H, D), k and v (B, Sk, K, D), leaves that want gradients; dout like q.

    bias: (1, H, Sq, Sk) or None, the same tensor in every set; a leaf where the case wants its gradient.
    slopes: (H,) float32 or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    bias: Tensor | None = None
    slopes: Tensor | None = None

    @cached_property
    def qkv(self) -> Tensor:
        """The same values packed as one projection gives them, (B, S, 3, H, D): a leaf of its own."""
        return torch.stack([self.q, self.k, self.v], dim=2).detach().requires_grad_()


class Context:
    """What the implementations of one case share: masks in the forms that some of them need, made when first asked."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device

    @cached_property
    def shared(self) -> Rule | Tensor | None:
        """The mask's rule, a block mask's table, or None where every pair is visible."""
        return shared_mask(self.case, self.device)

    @cached_property
    def dense(self) -> Tensor | None:
        """True where a pair is visible: (Sq, Sk), for block masks (H, Sq, Sk); None where all are."""
        if self.case.kind == "full":
            return None
        heads = self.case.heads if self.case.is_block_sparse else 1
        index = torch.arange(self.case.seqlen_q, device=self.device)
        whole = torch.cat(
            [
                torch.stack([visible(self.case, index[begin:end], head, self.shared) for head in range(heads)])
                for begin, end in pieces(self.case)
            ],
            dim=1,
        )
        return whole if self.case.is_block_sparse else whole[0]

    @cached_property
    def distance(self) -> Tensor:
        """(Sq, Sk) float32: how far apart a query's position and a key's are, for ALiBi."""
        offset = self.case.seqlen_k - self.case.seqlen_q
        query = torch.arange(self.case.seqlen_q, device=self.device, dtype=torch.float32) + offset
        key = torch.arange(self.case.seqlen_k, device=self.device, dtype=torch.float32)
        return (query[:, None] - key[None, :]).abs_()

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """(documents of the batch + 1,) int32 on the device, the rows of the batch one after the other."""
        return starts(self.case.documents * self.case.batch, self.device)

    @property
    def longest(self) -> int:
        """The longest document, in tokens."""
        return max(self.case.documents)


def make_sets(case: Case, device: torch.device, seed: int, cache_bytes: int) -> list[Inputs]:
    """Fresh standard-normal inputs, as many sets as together exceed twice the device's cache (32 at most).

    cache_bytes: of the last-level cache; 0 gives one set.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def tensor(length: int, heads: int, *, leaf: bool) -> Tensor:
        shape = (case.batch, length, heads, case.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=case.dtype, requires_grad=leaf)

    bias = slopes = None
    if case.bias:
        shape = (1, case.heads, case.seqlen_q, case.seqlen_k)
        bias = torch.randn(shape, generator=generator, device=device, dtype=case.dtype)
        bias.requires_grad_(case.bias == "bias gradient")
    if case.alibi:
        slopes = alibi_slopes(case.heads, device)
    elements = case.batch * case.head_dim * (case.heads * case.seqlen_q + 2 * case.kv_heads * case.seqlen_k)
    wanted = math.ceil(2 * cache_bytes / (elements * case.dtype.itemsize))
    return [
        Inputs(
            tensor(case.seqlen_q, case.heads, leaf=True),
            tensor(case.seqlen_k, case.kv_heads, leaf=True),
            tensor(case.seqlen_k, case.kv_heads, leaf=True),
            tensor(case.seqlen_q, case.heads, leaf=False),
            bias,
            slopes,
        )
        for _ in range(min(max(1, wanted), MOST_SETS))
    ]


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """(H,) float32: 2^(-8 h / H) for h = 1 ... H (ALiBi, arXiv 2108.12409)."""
    return torch.exp2(-8.0 / heads * torch.arange(1, heads + 1, device=device, dtype=torch.float32))
