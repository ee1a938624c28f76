"""The benchmark's masks: what each shows, that ours are the same, how pairs
and FLOPs are counted."""

from __future__ import annotations

import pytest
import torch

from flashtrain.errors import UserError
from flashtrain_recipes.attention_benchmark.baselines.ours import Flashtrain
from flashtrain_recipes.attention_benchmark.cases import Case, document_lengths, flops
from flashtrain_recipes.attention_benchmark.inputs import Context, block_table, make_sets

CPU = torch.device("cpu")
WITH_A_MASK_OF_OURS = (
    "document",
    "causal-document",
    "causal-document-zigzag",
    "prefix-lm",
    "shared-question",
    "global-window",
    "tile-10-3",
)


def case_of(mask: str, length: int = 640, **changes) -> Case:
    return Case(1, 2, length, 16, mask, dtype_name="float32", **changes)


@pytest.mark.parametrize("mask", [*WITH_A_MASK_OF_OURS, "block-random", "block-butterfly"])
def test_ours_shows_the_same_pairs_as_the_rule_that_the_others_get(mask: str) -> None:
    context = Context(case_of(mask, density=0.5), CPU)
    ours = Flashtrain().plan(context.case, context)().dense()[0]
    assert torch.equal(ours.expand_as(context.dense), context.dense)


def test_a_window_counts_both_of_its_ends_and_the_query_itself() -> None:
    dense = Context(case_of("window-2", 6), CPU).dense
    assert dense[4].tolist() == [False, False, True, True, True, False]
    assert Context(case_of("window-1-2", 6), CPU).dense[2].tolist() == [
        False,
        True,
        True,
        True,
        True,
        False,
    ]


def test_causal_is_aligned_bottom_right() -> None:
    assert Context(Case(1, 1, 2, 8, "causal", seqlen_k=4), CPU).dense.tolist() == [
        [True] * 3 + [False],
        [True] * 4,
    ]


def test_flops_are_counted_as_the_field_counts_them() -> None:
    def counted(case: Case, direction: str = "forward") -> float:
        return flops(case, Context(case, CPU).counted_pairs, direction)

    square = 4096 * 4096
    assert counted(Case(4, 16, 4096, 128, "full")) == 4 * 4 * 16 * square * 128
    assert (
        counted(Case(4, 16, 4096, 128, "causal"), "backward") == 2.5 * 4 * 4 * 16 * square * 128 / 2
    )
    narrow = Case(4, 16, 4096, 192, "full", value_dim=128)
    assert counted(narrow) == 2 * 4 * 16 * square * (192 + 128)
    assert counted(narrow, "backward") == 2 * 4 * 16 * square * (3 * 192 + 2 * 128)
    varlen = case_of("causal-varlen")
    assert counted(varlen) == 4 * 2 * 16 * sum(length**2 for length in varlen.documents) / 2
    assert counted(case_of("window-99")) == 4 * 2 * 16 * sum(min(i + 1, 100) for i in range(640))
    for mask in ("block-random", "block-butterfly"):
        context = Context(case_of(mask, density=0.5), CPU)
        # Of two heads the mean.
        assert context.counted_pairs == context.visible_pairs == int(context.dense.sum()) / 2


@pytest.mark.parametrize("total", [64, 512, 1024, 16384, 65536])
def test_documents_fill_the_row_with_lengths_in_their_range(total: int) -> None:
    lengths = document_lengths(total)
    assert sum(lengths) == total
    assert all(total // 64 <= length <= total // 8 for length in lengths)
    assert lengths == document_lengths(total)


def test_a_random_block_mask_has_its_density_in_every_row_of_whole_blocks() -> None:
    table = block_table(case_of("block-random", 128 * 20, density=0.25), CPU)
    assert table.shape == (2, 20, 20)
    assert table.sum(-1).unique().tolist() == [5]
    with pytest.raises(UserError, match="multiples of 128, not 200"):
        block_table(case_of("block-random", 200), CPU)


def test_sliding_tiles_see_27_tiles_of_a_video_of_whole_tiles() -> None:
    table = block_table(case_of("block-sliding", 128 * 20 * 4), CPU)
    assert table.shape == (2, 80, 80)
    assert table.sum(-1).unique().tolist() == [27]


def test_sets_are_fresh_and_as_many_as_outgrow_the_cache() -> None:
    case = Case(1, 2, 64, 16, "full", dtype_name="float32")  # 24 KiB of q, k and v
    assert len(make_sets(case, CPU, 0, 0)) == 1
    sets = make_sets(case, CPU, 0, 36 * 1024)
    assert len(sets) == 3
    assert not torch.equal(sets[0].q, sets[1].q)
    assert len(make_sets(case, CPU, 0, 2**30)) == 32
