"""The inputs of a case, the same for all implementations: random tensors, and which (query,
key) pairs are visible.

A mask is given as a rule: a function of head, query and key indices, broadcast against each other,
that returns whether a pair is visible. flashtrain gets its masks from flashtrain_kernels.masks
(baselines/ours.py), and tests compare the two.

B batch, S sequence (Sq queries, Sk keys), H query heads, K key/value heads, D head dimension
(Dv of values), n blocks a side, T packed tokens.
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
    """Return how many tokens the prefix of the prefix-lm mask has: a quarter of the sequence."""
    return seqlen // 4


def global_sizes(seqlen: int) -> tuple[int, int]:
    """Return (number of global tokens, window in tokens to each side) of the mask global-window."""
    return max(1, seqlen // 128), max(1, seqlen // 16)


def segment_lengths(case: Case) -> tuple[int, ...]:
    """Return the lengths of a row's documents; with shared-question those of the
    question and its six answers."""
    if case.kind != "shared-question":
        return case.documents
    answer = case.seqlen_q // 8
    return (case.seqlen_q - 6 * answer, *[answer] * 6)


def segment_ids(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the number of the document or segment that each token belongs to, (S,) int32."""
    counts = torch.tensor(lengths, device=device)
    ordinal = torch.arange(len(lengths), device=device, dtype=torch.int32)
    return torch.repeat_interleave(ordinal, counts, output_size=sum(lengths))


def starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the cumulative lengths from 0, (documents + 1,) int32: flash-attn's cu_seqlens."""
    ends = torch.tensor(lengths, device=device).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)


def zigzag(seqlen: int, device: torch.device) -> Tensor:
    """Return the tokens in the order of four ranks' zigzag shards, (S,): of eight pieces the first
    and the last, the second and the last but one, and so on."""
    pieces = torch.arange(seqlen, device=device).tensor_split(8)
    return torch.cat([piece for rank in range(4) for piece in (pieces[rank], pieces[7 - rank])])


def rule(case: Case, device: torch.device) -> Rule:
    """Return the case's mask as a function (head, queries, keys) -> which pairs are
    visible. Not for block masks."""
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
    if kind == "tile":
        size, last = case.seqlen_k // name.frames, name.references
        return lambda h, q, k: (q // size == k // size) | (q // size < last) | (k // size < last)
    lengths = segment_lengths(case)
    segment, question = segment_ids(lengths, device), lengths[0]
    if kind == "shared-question":
        return lambda h, q, k: ((segment[q] == segment[k]) | (k < question)) & (k <= q)
    if kind == "causal-document-zigzag":
        at = zigzag(case.seqlen_k, device)
        return lambda h, q, k: (segment[at[q]] == segment[at[k]]) & (at[k] <= at[q])
    if name.causal:
        return lambda h, q, k: (segment[q] == segment[k]) & (k <= q)
    return lambda h, q, k: segment[q] == segment[k]


def block_table(case: Case, device: torch.device) -> Tensor:
    """Return which blocks of BLOCK_SIZE queries x BLOCK_SIZE keys the case's block mask
    computes, (H, n, n) bool.

    Raises:
        UserError: Sk is no multiple of BLOCK_SIZE, or Sq differs from it.
    """
    blocks = case.seqlen_k // BLOCK_SIZE
    if blocks * BLOCK_SIZE != case.seqlen_k or case.seqlen_q != case.seqlen_k:
        raise UserError(
            "benchmark.masks: "
            f"{case.mask} expects lengths that are multiples of {BLOCK_SIZE}, not {case.seqlen_q}."
        )
    if case.kind == "block-butterfly":
        return block_sparse.butterfly(blocks, device=device).expand(case.heads, -1, -1)
    if case.kind == "block-sliding":
        tiles = blocks // 20, 4, 5  # of 32 x 40 tokens 20 cover two frames
        return block_sparse.sliding_tiles(tiles, (3, 3, 3)).to(device).expand(case.heads, -1, -1)
    return block_sparse.random(case.heads, blocks, blocks, case.density, device=device)


def query_chunks(case: Case, limit: int = _CHUNK) -> list[tuple[int, int]]:
    """Return (begin, end) ranges of queries, each of which covers at most `limit` elements
    of the Sq x Sk matrix."""
    rows = max(1, limit // case.seqlen_k)
    return [(begin, min(begin + rows, case.seqlen_q)) for begin in range(0, case.seqlen_q, rows)]


@dataclass(frozen=True)
class Inputs:
    """One set of random inputs. q, k, v and sink require gradients; bias does where
    its gradient is measured."""

    q: Tensor  # (B, Sq, H, D)
    k: Tensor  # (B, Sk, K, D)
    v: Tensor  # (B, Sk, K, Dv)
    dout: Tensor  # (B, Sq, H, Dv)
    bias: Tensor | None = None  # (1, H, Sq, Sk), the same in every set
    slopes: Tensor | None = None  # (H,) float32
    sink: Tensor | None = None  # (H,)

    @cached_property
    def pages(self) -> tuple[Tensor, Tensor, Tensor]:
        """k and v cut into shuffled pages, each (pages, PAGE, K, D), and the page
        table, (B, Sk / PAGE) int32."""
        k, v = (x.detach().reshape(-1, PAGE, *x.shape[2:]) for x in (self.k, self.v))
        order = torch.randperm(k.shape[0], device=k.device)
        return k[order], v[order], order.argsort().to(torch.int32).view(self.k.shape[0], -1)

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that require gradients: q, k, v, then bias and sink where they do."""
        extra = [x for x in (self.bias, self.sink) if x is not None and x.requires_grad]
        return [self.q, self.k, self.v, *extra]


class Context:
    """The mask of one case in each form that an implementation needs, made at its first use."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device

    @cached_property
    def table(self) -> Tensor:
        """The blocks that a block mask computes, (H, n, n) bool; only for block masks."""
        return block_table(self.case, self.device)

    @cached_property
    def rule(self) -> Rule:
        """The case's mask, block masks included, as a function (head, queries, keys) ->
        which pairs are visible."""
        if not self.case.is_block_sparse:
            return rule(self.case, self.device)
        table = self.table
        return lambda h, q, k: table[h, q // BLOCK_SIZE, k // BLOCK_SIZE]

    def visible(self, head: int, begin: int, end: int) -> Tensor:
        """Return which keys are visible to the queries begin to end - 1 of a head,
        (end - begin, Sk) bool."""
        keys = torch.arange(self.case.seqlen_k, device=self.device)
        return self.rule(head, torch.arange(begin, end, device=self.device)[:, None], keys[None, :])

    @cached_property
    def dense(self) -> Tensor | None:
        """The visible pairs as a matrix, (Sq, Sk) bool, or (H, Sq, Sk) for block masks;
        None: all are visible."""
        if self.case.kind == "full":
            return None
        heads = self.case.heads if self.case.is_block_sparse else 1
        whole = [
            torch.cat([self.visible(head, *chunk) for chunk in query_chunks(self.case)])
            for head in range(heads)
        ]
        return torch.stack(whole) if self.case.is_block_sparse else whole[0]

    @cached_property
    def visible_pairs(self) -> int:
        """The number of visible pairs of one head in one sequence; for block masks
        the mean over the heads."""
        if self.case.is_block_sparse:
            return round(int(self.table.sum()) * BLOCK_SIZE**2 / self.case.heads)
        return sum(int(self.visible(0, *chunk).sum()) for chunk in query_chunks(self.case))

    @property
    def counted_pairs(self) -> float:
        """The pairs by which FLOPs are counted, as in papers: causal counts as exactly
        half of a full square."""
        case = self.case
        half = 0.5 if case.mask_name.causal else 1.0
        if case.kind in ("full", "causal") and case.seqlen_q == case.seqlen_k:
            return half * case.seqlen_q * case.seqlen_k
        if case.has_documents:
            return half * sum(length**2 for length in case.documents)
        return float(self.visible_pairs)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """The cumulative lengths of all documents of the batch, from 0, (documents + 1,) int32."""
        return starts(self.case.documents * self.case.batch, self.device)

    @cached_property
    def filled(self) -> Tensor:
        """The number of keys in the cache of each sequence, (B,) int32: the cache is full."""
        return torch.full(
            (self.case.batch,), self.case.seqlen_k, dtype=torch.int32, device=self.device
        )


def make_sets(case: Case, device: torch.device, seed: int, cache_bytes: int) -> list[Inputs]:
    """Return sets of standard-normal inputs, so many that together they exceed twice the
    cache, at most MAX_SETS.

    Args:
        cache_bytes: size of the device's last-level cache; 0 gives one set.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def drawn(*shape: int, leaf: bool = True) -> Tensor:
        return torch.randn(
            shape, generator=generator, device=device, dtype=case.dtype, requires_grad=leaf
        )

    queries = (case.batch, case.seqlen_q, case.heads, case.head_dim)
    keys = (case.batch, case.seqlen_k, case.kv_heads, case.head_dim)
    values = (*keys[:3], case.value_width)
    bias = slopes = sink = None
    if "bias" in case.features or "bias gradient" in case.features:
        bias = drawn(
            1, case.heads, case.seqlen_q, case.seqlen_k, leaf="bias gradient" in case.features
        )
    if "ALiBi" in case.features:
        slopes = alibi_slopes(case.heads, device)
    if "sinks" in case.features:
        sink = drawn(case.heads)
    wanted = math.ceil(
        2 * cache_bytes / (sum(map(math.prod, (queries, keys, values))) * case.dtype.itemsize)
    )
    return [
        Inputs(
            drawn(*queries),
            drawn(*keys),
            drawn(*values),
            drawn(*queries[:3], case.value_width, leaf=False),
            bias,
            slopes,
            sink,
        )
        for _ in range(min(max(1, wanted), MAX_SETS))
    ]


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """Return the ALiBi slopes 2^(-8 h / H) of heads h = 1 ... H, (H,) float32
    (arXiv 2108.12409)."""
    return torch.exp2(-8.0 / heads * torch.arange(1, heads + 1, device=device, dtype=torch.float32))
