"""Which pairs of a case's queries and keys are visible: a rule each, for the reference, dense masks and FlexAttention.

A rule is a function of query and key indices, tensors of integers that broadcast. Ours gets the same masks from
flashtrain_kernels.masks (peers/ours.py); tests hold the two against each other.
S sequence (Sq queries, Sk keys), H heads, n blocks a side.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain_kernels import block_sparse
from flashtrain_recipes.attention_benchmark.case import BLOCK_SIZE, Case

Rule = Callable[[Tensor, Tensor], Tensor]

BLOCK_CAUSAL = 256
# Elements of a dense piece of the mask that is made at once.
_PIECE = 2**26


def document_lengths(total: int, count: int | None = None, seed: int = 0) -> tuple[int, ...]:
    """Lengths of documents that fill `total` tokens: random from total/64 to total/8, always the same for a seed.

    count: how many; None: as many as it takes. Raises UserError where so many cannot have such lengths.
    """
    draw = random.Random(seed)
    low, high = max(1, total // 64), max(1, total // 8)
    if count is None:
        count = max(1, round(2 * total / (low + high)))
    if not low * count <= total <= high * count:
        raise UserError(f"{count} documents of {low} to {high} tokens cannot fill {total}.")
    lengths = [draw.randint(low, high) for _ in range(count)]
    # Move towards the total, a token of a random document at a time at the worst; the range is never left.
    while (short := total - sum(lengths)) != 0:
        index = draw.randrange(count)
        step = max(1, abs(short) // count)
        wanted = lengths[index] + (step if short > 0 else -step)
        lengths[index] = min(high, max(low, wanted))
    return tuple(lengths)


def prefix_length(seqlen: int) -> int:
    """Tokens of a prefix-LM's prefix: a quarter."""
    return seqlen // 4


def global_sizes(seqlen: int) -> tuple[int, int]:
    """(global tokens, window to each side) of the mask global-window."""
    return max(1, seqlen // 128), max(1, seqlen // 16)


def segment_lengths(case: Case) -> tuple[int, ...]:
    """Question and answers of shared-question; else the documents."""
    if case.kind != "shared-question":
        return case.documents
    answer = case.seqlen_q // 8
    return (case.seqlen_q - 6 * answer, *[answer] * 6)


def numbers(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """(S,) int32: which document or segment each token belongs to."""
    counts = torch.tensor(lengths, device=device)
    ordinal = torch.arange(len(lengths), device=device, dtype=torch.int32)
    return torch.repeat_interleave(ordinal, counts, output_size=sum(lengths))


def starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """(documents + 1,) int32: cumulative lengths from 0, flash-attn's cu_seqlens."""
    ends = torch.tensor(lengths, device=device).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)


def rule(case: Case, device: torch.device) -> Rule | None:
    """The rule of a case's mask, None where every pair is visible. Block masks have tables (block_table) instead."""
    name, kind, offset = case.mask_name, case.kind, case.seqlen_k - case.seqlen_q
    if kind == "full":
        return None
    if kind == "causal":
        return lambda q, k: k <= q + offset
    if kind == "window":
        left, right = name.left, name.right
        return lambda q, k: (k >= q + (offset - left)) & (k <= q + (offset + right))
    if kind == "prefix-lm":
        prefix = prefix_length(case.seqlen_k)
        return lambda q, k: (k < prefix) | (k <= q)
    if kind == "global-window":
        tokens, window = global_sizes(case.seqlen_k)
        return lambda q, k: (q < tokens) | (k < tokens) | ((k >= q - window) & (k <= q + window))
    if case.is_block_sparse:
        raise ValueError(f"{case.mask} is a table of blocks: use block_table")
    return _segment_rule(case, device)


def _segment_rule(case: Case, device: torch.device) -> Rule:
    lengths = segment_lengths(case)
    segment = numbers(lengths, device)
    begin = starts(lengths, device)[:-1][segment]
    if case.kind in ("document", "varlen"):
        return lambda q, k: segment[q] == segment[k]
    if case.kind in ("causal-document", "causal-varlen"):
        return lambda q, k: (segment[q] == segment[k]) & (k <= q)
    if case.kind == "prefix-lm-document":
        quarters = torch.tensor([prefix_length(length) for length in lengths], device=device)[segment]
        prefix_end = begin + quarters
        return lambda q, k: (segment[q] == segment[k]) & ((k < prefix_end[q]) | (k <= q))
    if case.kind == "shared-question":
        question = lengths[0]
        return lambda q, k: ((segment[q] == segment[k]) | (k < question)) & (k <= q)
    if case.kind == "causal-blockwise":
        last = len(lengths) - 1
        return lambda q, k: ((segment[q] == segment[k]) | (segment[q] == last)) & (k <= q)
    index = torch.arange(case.seqlen_q, device=device)
    block_end = begin + ((index - begin) // BLOCK_CAUSAL + 1) * BLOCK_CAUSAL
    return lambda q, k: (segment[q] == segment[k]) & (k < block_end[q])


def block_table(case: Case, device: torch.device) -> Tensor:
    """(H, n, n) bool: the blocks of BLOCK_SIZE tokens that a block mask computes. Raises UserError for odd lengths.

    block-random: in each row of each head the case's share of the blocks, at least one. block-butterfly: the blocks
    whose numbers differ in at most one binary digit, alike for every head.
    """
    blocks = case.seqlen_k // BLOCK_SIZE
    if blocks * BLOCK_SIZE != case.seqlen_k or case.seqlen_q != case.seqlen_k:
        raise UserError(f"{case.mask} needs lengths that are multiples of {BLOCK_SIZE}, not {case.seqlen_q}.")
    if case.kind == "block-butterfly":
        return block_sparse.butterfly(blocks, device=device).expand(case.heads, -1, -1)
    return block_sparse.random(case.heads, blocks, blocks, case.density, device=device)


def visible(case: Case, queries: Tensor, head: int, shared: Rule | Tensor | None) -> Tensor:
    """(queries, Sk) bool for one head. shared: the case's rule or block table, made once."""
    keys = torch.arange(case.seqlen_k, device=queries.device)
    if shared is None:
        return torch.ones(queries.shape[0], case.seqlen_k, dtype=torch.bool, device=queries.device)
    if isinstance(shared, Tensor):
        return shared[head][(queries // BLOCK_SIZE)[:, None], (keys // BLOCK_SIZE)[None, :]]
    return shared(queries[:, None], keys[None, :])


def shared_mask(case: Case, device: torch.device) -> Rule | Tensor | None:
    """What `visible` is given: the rule, or the table of a block mask."""
    return block_table(case, device) if case.is_block_sparse else rule(case, device)


def pieces(case: Case, limit: int = _PIECE) -> list[tuple[int, int]]:
    """Ranges of queries whose part of the S x S matrix has at most `limit` elements."""
    rows = max(1, limit // case.seqlen_k)
    return [(begin, min(begin + rows, case.seqlen_q)) for begin in range(0, case.seqlen_q, rows)]


def visible_pairs(case: Case, device: torch.device) -> int:
    """Visible pairs over one row of the batch, of one head (of all heads' mean, for block masks, rounded)."""
    if case.kind == "full":
        return case.seqlen_q * case.seqlen_k
    if case.is_block_sparse:
        return round(int(block_table(case, device).sum()) * BLOCK_SIZE**2 / case.heads)
    if case.kind in ("causal", "window"):
        position = torch.arange(case.seqlen_q) + (case.seqlen_k - case.seqlen_q)
        name = case.mask_name
        low = (position - name.left).clamp(min=0) if name.left >= 0 else torch.zeros_like(position)
        high = (position + name.right + 1).clamp(max=case.seqlen_k)
        return int((high - low).clamp(min=0).sum())
    shared = rule(case, device)
    index = torch.arange(case.seqlen_q, device=device)
    return sum(int(visible(case, index[begin:end], 0, shared).sum()) for begin, end in pieces(case))


def counted_pairs(case: Case, visible_count: int) -> float:
    """The pairs that FLOPs are counted by, as the field counts them: causal is half of the square, exactly.

    visible_count: visible_pairs(case), which counts for every mask but full, causal and documents of either kind.
    """
    half = 0.5 if case.mask_name.causal else 1.0
    if case.kind in ("full", "causal") and case.seqlen_q == case.seqlen_k:
        return half * case.seqlen_q * case.seqlen_k
    if case.kind in ("document", "varlen", "causal-document", "causal-varlen"):
        return half * sum(length**2 for length in case.documents)
    return float(visible_count)
