"""The planner of documents over ranks, as a specification."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from flashtrain.distributed.context.document_costs import DocumentCosts
from flashtrain.distributed.context.document_plan import (
    EVEN,
    DocumentPlan,
    plan_documents,
    room_for,
)
from flashtrain.distributed.context.group import block_sizes
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.layer_spec import FeedForwardSpec, LayerSpec, layers_alike
from flashtrain.models.state_spec import DeltaSpec

LLAMA = layers_alike(32, 4096, 32, 8, 14336, "swiglu")
COSTS = DocumentCosts(LLAMA, 6 * 7.5e9, near=8)


def long_tail(tokens: int, seed: int = 0) -> list[int]:
    """Lengths with a median of 2K and at most 256K."""
    draw, lengths = random.Random(seed), []
    while tokens:
        lengths.append(min(tokens, 262144, max(16, round(draw.lognormvariate(7.62, 1.6)))))
        tokens -= lengths[-1]
    return lengths


def planned(lengths: Sequence[int], ranks: int, costs: DocumentCosts = COSTS) -> DocumentPlan:
    plan = plan_documents(lengths, ranks, costs)
    assert sorted(plan.places) == list(range(len(lengths)))
    for first, count in plan.places.values():
        assert count in block_sizes(ranks)
        assert first % count == 0
    return plan


def slowest(plan: DocumentPlan, lengths: Sequence[int], costs: DocumentCosts = COSTS) -> float:
    """The slowest rank's seconds, over the mean if all documents were whole."""
    mean = sum(costs.seconds(length, 1) for length in lengths) / len(plan.tokens)
    return float(max(plan.seconds_of(costs))) / mean


def test_ranks_share_documents_in_blocks_of_divisors() -> None:
    assert block_sizes(1) == [1]
    assert block_sizes(8) == [1, 2, 4, 8]
    assert block_sizes(12) == [1, 2, 4, 12]


def test_what_fits_a_rank_is_whole() -> None:
    lengths = [2048] * 256
    plan = planned(lengths, 8)
    assert {place.ranks for place in plan.places.values()} == {1}
    assert slowest(plan, lengths) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(4))
def test_only_documents_that_fit_no_rank_are_divided(seed: int) -> None:
    lengths = long_tail(16 * 65536, seed)
    plan = planned(lengths, 16)
    mean = sum(COSTS.seconds(length, 1) for length in lengths) / 16
    for length, place in zip(lengths, (plan.places[n] for n in range(len(lengths))), strict=True):
        fits = length <= room_for(sum(lengths), 16) and COSTS.seconds(length, 1) <= EVEN * mean
        assert fits == (place.ranks == 1)


def test_a_long_document_is_divided_over_as_many_ranks_as_its_work_needs() -> None:
    lengths = [65536, *[4096] * 112]
    plan = planned(lengths, 8)
    assert plan.places[0] == (0, 2)
    assert plan.tokens[:2].max() < plan.tokens[2:].min()  # attention takes their time
    assert slowest(plan, lengths) < EVEN


def test_more_ranks_are_taken_as_long_as_they_pay() -> None:
    lengths = [8192, *[512] * 64]
    near, far = (DocumentCosts(LLAMA, 1e9, near=one) for one in (32, 2))
    assert planned(lengths, 32, near).places[0].ranks == 32
    # A rank has room for an eighth of it; more would wait for the network.
    assert planned(lengths, 32, far).places[0].ranks == 8


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("seed", range(3))
def test_work_is_even_and_room_is_not_exceeded(ranks: int, seed: int) -> None:
    lengths = long_tail(ranks * 65536, seed)
    plan = planned(lengths, ranks)
    assert slowest(plan, lengths) < 1.1
    assert plan.held.max() <= room_for(sum(lengths), ranks)


def test_ranks_may_be_left_without_a_document() -> None:
    assert planned([2, 2, 2], 8).tokens.min() == 0


def test_a_plan_is_a_function_of_the_lengths() -> None:
    lengths = long_tail(8 * 65536)
    assert (
        planned(lengths, 8).places
        == planned(list(lengths), 8, DocumentCosts(LLAMA, 6 * 7.5e9, near=8)).places
    )


def test_states_that_pass_count() -> None:
    attention = LayerSpec(AttentionSpec(32, 8, 128), FeedForwardSpec(14336))
    states = LayerSpec(DeltaSpec(32, 128), FeedForwardSpec(14336))
    alone, passing = DocumentCosts([attention], 1e9), DocumentCosts([attention, states], 1e9)
    assert passing.seconds(65536, 1) == alone.seconds(65536, 1)
    sent = 2 * 4 * states.mixer.passed * 2 * 3 / 2.8e11
    assert passing.seconds(65536, 4) == pytest.approx(alone.seconds(65536, 4) + sent)
