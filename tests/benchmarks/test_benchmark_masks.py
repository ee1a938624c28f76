"""The benchmark's masks: what each shows, that ours are the same, and how pairs and FLOPs are counted."""

from __future__ import annotations

import pytest
import torch

from flashtrain.errors import UserError
from flashtrain_recipes.attention_benchmark.cases import Case, document_lengths, flops
from flashtrain_recipes.attention_benchmark.inputs import Context, block_table, counted_pairs, visible_pairs
from flashtrain_recipes.attention_benchmark.names import WITH_DOCUMENTS
from flashtrain_recipes.attention_benchmark.peers.ours import make_mask

CPU = torch.device("cpu")
WITH_A_MASK_OF_OURS = (
    "document",
    "causal-document",
    "prefix-lm",
    "prefix-lm-document",
    "shared-question",
    "global-window",
    "causal-blockwise",
    "block-causal-document",
)


def case_of(mask: str, length: int = 640, **changes) -> Case:
    documents = document_lengths(length) if mask in WITH_DOCUMENTS else ()
    return Case(1, 2, length, 16, mask, documents=documents, dtype_name="float32", **changes)


@pytest.mark.parametrize("mask", WITH_A_MASK_OF_OURS)
def test_ours_shows_the_same_pairs_as_the_rule_that_the_others_get(mask: str) -> None:
    context = Context(case_of(mask), CPU)
    assert torch.equal(make_mask(context.case, context).dense()[0], context.dense)


@pytest.mark.parametrize("mask", ["block-random", "block-butterfly"])
def test_ours_computes_the_same_blocks(mask: str) -> None:
    context = Context(case_of(mask, 512, density=0.5), CPU)
    ours = make_mask(context.case, context).dense()[0]
    assert torch.equal(ours.expand(2, -1, -1), context.dense)


def test_a_window_counts_both_of_its_ends_and_the_query_itself() -> None:
    dense = Context(case_of("window-2", 6), CPU).dense
    assert dense[4].tolist() == [False, False, True, True, True, False]
    assert Context(case_of("window-1-2", 6), CPU).dense[2].tolist() == [False, True, True, True, True, False]


def test_causal_is_aligned_bottom_right() -> None:
    assert Context(Case(1, 1, 2, 8, "causal", seqlen_k=4), CPU).dense.tolist() == [[True] * 3 + [False], [True] * 4]


@pytest.mark.parametrize("mask", ["causal", "window-100", "window-30-40", *WITH_A_MASK_OF_OURS])
def test_pairs_are_those_of_the_dense_mask(mask: str) -> None:
    case = case_of(mask)
    assert visible_pairs(case, CPU) == int(Context(case, CPU).dense.sum())


def test_flops_are_counted_as_the_field_counts_them() -> None:
    full, causal = Case(4, 16, 4096, 128, "full"), Case(4, 16, 4096, 128, "causal")
    square = 4096 * 4096
    assert flops(full, counted_pairs(full, 0), "forward") == 4 * 4 * 16 * square * 128
    assert flops(causal, counted_pairs(causal, 0), "backward") == 2.5 * 4 * 4 * 16 * square * 128 / 2
    varlen = case_of("causal-varlen")
    assert counted_pairs(varlen, 0) == sum(length**2 for length in varlen.documents) / 2
    window = Case(1, 32, 16384, 64, "window-1024")
    pairs = visible_pairs(window, CPU)
    assert pairs == sum(min(i + 1, 1025) for i in range(16384))
    assert counted_pairs(window, pairs) == pairs


@pytest.mark.parametrize("total", [64, 512, 1024, 16384, 65536])
def test_documents_fill_the_row_with_lengths_in_their_range(total: int) -> None:
    lengths = document_lengths(total)
    assert sum(lengths) == total
    assert all(total // 64 <= length <= total // 8 for length in lengths)
    assert lengths == document_lengths(total)


def test_the_anchors_documents_are_13() -> None:
    lengths = document_lengths(32768, 13)
    assert (len(lengths), sum(lengths)) == (13, 32768)
    assert 512 <= min(lengths) <= max(lengths) <= 4096


def test_documents_that_cannot_fill_a_row_are_refused() -> None:
    with pytest.raises(UserError, match="3 documents of 16 to 128 tokens cannot fill 1024"):
        document_lengths(1024, 3)


def test_a_random_block_mask_has_its_density_in_every_row() -> None:
    table = block_table(case_of("block-random", 128 * 20, density=0.25), CPU)
    assert table.shape == (2, 20, 20)
    assert table.sum(-1).unique().tolist() == [5]


def test_blocks_need_lengths_of_whole_blocks() -> None:
    with pytest.raises(UserError, match="multiples of 128, not 200"):
        block_table(case_of("block-random", 200), CPU)
