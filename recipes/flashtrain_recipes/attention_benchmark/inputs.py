"""What the implementations of a case are given: random tensors, and which pairs of queries and keys are visible.

A mask is a rule here: a function of head, query and key indices that broadcast. Ours gets its masks from
flashtrain_kernels.masks (baselines/ours.py), and tests compare the two.

B batch, S sequence (Sq queries, Sk keys), H query heads, K key/value heads, D head dimension, n blocks a side, T packed
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain_kernels import block_sparse
from flashtrain_recipes.attention_benchmark.cases import BLOCK_SIZE, PAGE, Case

Rule = Callable[[Any, Tensor, Tensor], Tensor]

_CHUNK = 2**26  # elements of the dense mask that are made at once
MAX_SETS = 32


def prefix_length(seqlen: int) -> int:
    """Return the tokens of a prefix-LM's prefix: a quarter."""
    return seqlen // 4


def global_sizes(seqlen: int) -> tuple[int, int]:
    """Return (global tokens, window to each side) of the mask global-window."""
    return max(1, seqlen // 128), max(1, seqlen // 16)


def segment_lengths(case: Case) -> tuple[int, ...]:
    """Return the lengths of question and answers with shared-question, else those of the documents."""
    if case.kind != "shared-question":
        return case.documents
    answer = case.seqlen_q // 8
    return (case.seqlen_q - 6 * answer, *[answer] * 6)


def segment_ids(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the document or segment that each token belongs to, (S,) int32."""
    counts = torch.tensor(lengths, device=device)
    ordinal = torch.arange(len(lengths), device=device, dtype=torch.int32)
    return torch.repeat_interleave(ordinal, counts, output_size=sum(lengths))


def starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the cumulative lengths from 0, (documents + 1,) int32: flash-attn's cu_seqlens."""
    ends = torch.tensor(lengths, device=device).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)


def rule(case: Case, device: torch.device) -> Rule:
    """Return the rule of a case's mask, which is no table of blocks."""
    name, kind, offset = case.mask_name, case.kind, case.seqlen_k - case.seqlen_q
    if kind == "full":
        return lambda h, q, k: (q >= 0) & (k >= 0)
    if kind == "causal":
        return lambda h, q, k: k <= q + offset
    if kind == "window":
        left, right = name.left, name.right
        return lambda h, q, k: (k >= q + (offset - left)) & (k <= q + (offset + right))
    if kind == "prefix-lm":
        prefix = prefix_length(case.seqlen_k)
        return lambda h, q, k: (k < prefix) | (k <= q)
    if kind == "global-window":
        tokens, window = global_sizes(case.seqlen_k)
        return lambda h, q, k: (q < tokens) | (k < tokens) | ((k >= q - window) & (k <= q + window))
    lengths = segment_lengths(case)
    segment, question = segment_ids(lengths, device), lengths[0]
    if kind == "shared-question":
        return lambda h, q, k: ((segment[q] == segment[k]) | (k < question)) & (k <= q)
    if name.causal:
        return lambda h, q, k: (segment[q] == segment[k]) & (k <= q)
    return lambda h, q, k: segment[q] == segment[k]


def block_table(case: Case, device: torch.device) -> Tensor:
    """Return the blocks of BLOCK_SIZE tokens that a block mask computes, (H, n, n) bool.

    Raises:
        UserError: a length is no multiple of BLOCK_SIZE.
    """
    blocks = case.seqlen_k // BLOCK_SIZE
    if blocks * BLOCK_SIZE != case.seqlen_k or case.seqlen_q != case.seqlen_k:
        raise UserError(f"{case.mask} needs lengths that are multiples of {BLOCK_SIZE}, not {case.seqlen_q}.")
    if case.kind == "block-butterfly":
        return block_sparse.butterfly(blocks, device=device).expand(case.heads, -1, -1)
    return block_sparse.random(case.heads, blocks, blocks, case.density, device=device)


def query_chunks(case: Case, limit: int = _CHUNK) -> list[tuple[int, int]]:
    """Return ranges of queries whose rows of the S x S matrix have at most `limit` elements."""
    rows = max(1, limit // case.seqlen_k)
    return [(begin, min(begin + rows, case.seqlen_q)) for begin in range(0, case.seqlen_q, rows)]


@dataclass(frozen=True)
class Inputs:
    """One set of inputs; q, k, v and sink want gradients."""

    q: Tensor  # (B, Sq, H, D)
    k: Tensor  # (B, Sk, K, D)
    v: Tensor  # (B, Sk, K, D)
    dout: Tensor  # (B, Sq, H, D)
    bias: Tensor | None = None  # (1, H, Sq, Sk), the same in every set; wants its gradient where the case says so
    slopes: Tensor | None = None  # (H,) float32
    sink: Tensor | None = None  # (H,)

    @cached_property
    def pages(self) -> tuple[Tensor, Tensor, Tensor]:
        """k and v in shuffled pages, each (pages, PAGE, K, D), and the number of each page, (B, Sk / PAGE) int32."""
        k, v = (x.detach().reshape(-1, PAGE, *x.shape[2:]) for x in (self.k, self.v))
        order = torch.randperm(k.shape[0], device=k.device)
        return k[order], v[order], order.argsort().to(torch.int32).view(self.k.shape[0], -1)

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that want gradients: q, k, v, then bias and sink."""
        extra = [x for x in (self.bias, self.sink) if x is not None and x.requires_grad]
        return [self.q, self.k, self.v, *extra]


class Context:
    """The masks of one case, in each form that an implementation needs, made when first used."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device

    @cached_property
    def table(self) -> Tensor:
        """A block mask's, (H, n, n) bool."""
        return block_table(self.case, self.device)

    @cached_property
    def rule(self) -> Rule:
        """The mask's rule, also a block mask's."""
        if not self.case.is_block_sparse:
            return rule(self.case, self.device)
        table = self.table
        return lambda h, q, k: table[h, q // BLOCK_SIZE, k // BLOCK_SIZE]

    def visible(self, head: int, begin: int, end: int) -> Tensor:
        """Return which keys the queries from `begin` to before `end` see, (queries, Sk) bool."""
        keys = torch.arange(self.case.seqlen_k, device=self.device)
        return self.rule(head, torch.arange(begin, end, device=self.device)[:, None], keys[None, :])

    @cached_property
    def dense(self) -> Tensor | None:
        """Which pairs are visible, (Sq, Sk) or for block masks (H, Sq, Sk) bool; None: all."""
        if self.case.kind == "full":
            return None
        heads = self.case.heads if self.case.is_block_sparse else 1
        whole = [torch.cat([self.visible(head, *chunk) for chunk in query_chunks(self.case)]) for head in range(heads)]
        return torch.stack(whole) if self.case.is_block_sparse else whole[0]

    @cached_property
    def visible_pairs(self) -> int:
        """Visible pairs of one head over one row of the batch; for block masks the mean over the heads."""
        if self.case.is_block_sparse:
            return round(int(self.table.sum()) * BLOCK_SIZE**2 / self.case.heads)
        return sum(int(self.visible(0, *chunk).sum()) for chunk in query_chunks(self.case))

    @property
    def counted_pairs(self) -> float:
        """The pairs that FLOPs are counted by; as the field counts them, causal is exactly half of the square."""
        case = self.case
        half = 0.5 if case.mask_name.causal else 1.0
        if case.kind in ("full", "causal") and case.seqlen_q == case.seqlen_k:
            return half * case.seqlen_q * case.seqlen_k
        return half * sum(length**2 for length in case.documents) if case.has_documents else float(self.visible_pairs)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """The cumulative lengths of the batch's documents, row after row, (documents + 1,) int32."""
        return starts(self.case.documents * self.case.batch, self.device)

    @cached_property
    def filled(self) -> Tensor:
        """How many keys of its cache each sequence has, all of them, (B,) int32."""
        return torch.full((self.case.batch,), self.case.seqlen_k, dtype=torch.int32, device=self.device)

    @property
    def longest(self) -> int:
        """The longest document, in tokens."""
        return max(self.case.documents)


def make_sets(case: Case, device: torch.device, seed: int, cache_bytes: int) -> list[Inputs]:
    """Return standard-normal inputs: as many sets as together exceed twice the cache, MAX_SETS at most.

    Args:
        cache_bytes: of the device's last-level cache; 0 gives one set.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def drawn(*shape: int, leaf: bool = True) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=case.dtype, requires_grad=leaf)

    queries = (case.batch, case.seqlen_q, case.heads, case.head_dim)
    keys = (case.batch, case.seqlen_k, case.kv_heads, case.head_dim)
    bias = slopes = sink = None
    if "bias" in case.features or "bias gradient" in case.features:
        bias = drawn(1, case.heads, case.seqlen_q, case.seqlen_k, leaf="bias gradient" in case.features)
    if "ALiBi" in case.features:
        slopes = alibi_slopes(case.heads, device)
    if "sinks" in case.features:
        sink = drawn(case.heads)
    wanted = math.ceil(2 * cache_bytes / ((math.prod(queries) + 2 * math.prod(keys)) * case.dtype.itemsize))
    return [
        Inputs(drawn(*queries), drawn(*keys), drawn(*keys), drawn(*queries, leaf=False), bias, slopes, sink)
        for _ in range(min(max(1, wanted), MAX_SETS))
    ]


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """Return 2^(-8 h / H) for h = 1 ... H, (H,) float32 (ALiBi, arXiv 2108.12409)."""
    return torch.exp2(-8.0 / heads * torch.arange(1, heads + 1, device=device, dtype=torch.float32))
