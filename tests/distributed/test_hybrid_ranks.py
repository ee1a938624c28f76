"""transformers' hybrids and our own decoders with states over gloo ranks are one process's, in
float64: states and the tokens before a convolution pass every border of ranks, and no border of
documents. Ours are LASP-2H (Sun et al. 2025, "LASP-2"), linear and exact layers in one strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
from hybrid_ranks import KINDS, LONG, MORE_LENGTHS, RECOMPUTED, STATES, Case, cases
from ranks import of_ranks

EXACT, SINGLE = 1e-10, 1e-4  # of float64, and of float32 through recurrences
DEGREES = {"two": 2, "four": 4}


def wrong(ranks: Path, mine: list[Case]) -> list[str]:
    assert mine
    lines = []
    for folder, degree in DEGREES.items():
        for number, of_rank in enumerate(of_ranks(ranks / folder, degree)):
            for case in mine:
                lines += [
                    f"{case}, rank {number} of {degree}: {name} is off by {error:.1e}"
                    for name, error in of_rank[str(case)].items()
                    if name != "calls"
                    and not error <= (SINGLE if case.adapted else EXACT)  # nor NaN
                ]
    return lines


@pytest.mark.integration
@pytest.mark.parametrize("kind", KINDS)
def test_logits_losses_and_all_gradients_are_one_process(hybrid_ranks: Path, kind: str) -> None:
    mine = [case for case in cases() if case.kind == kind and not case.adapted]
    assert not (found := wrong(hybrid_ranks, mine)), "\n".join(found)


@pytest.mark.integration
@pytest.mark.parametrize("kind", RECOMPUTED)
def test_adapters_learn_the_same_while_layers_are_computed_again(
    hybrid_ranks: Path, kind: str
) -> None:
    mine = [case for case in cases() if case.kind == kind and case.adapted]
    assert not (found := wrong(hybrid_ranks, mine)), "\n".join(found)


def calls_of(ranks: Path, case: Case) -> list[dict[str, list[int]]]:
    """The bytes that each rank gave to each collective: of two forwards and one backward."""
    return [
        of_rank[str(case)]["calls"]
        for folder, degree in DEGREES.items()
        for of_rank in of_ranks(ranks / folder, degree)
    ]


@pytest.mark.integration
@pytest.mark.parametrize("kind", MORE_LENGTHS)
def test_what_is_sent_does_not_grow_with_the_sequence(hybrid_ranks: Path, kind: str) -> None:
    once, twice = (calls_of(hybrid_ranks, Case(kind, length=n * LONG)) for n in (1, 2))
    assert once == twice
    assert all(sum(calls["gather"]) > 0 for calls in once)


@pytest.mark.integration
@pytest.mark.parametrize("kind", STATES)
def test_lasp2_algorithm_2_has_one_gather_of_states_forward_and_one_of_gradients_backward(
    hybrid_ranks: Path, kind: str
) -> None:
    # A layer with a convolution gives the tokens before its runs, too.
    collectives, forwards = 2 if kind in ("delta", "mamba2") else 1, 2
    for calls in calls_of(hybrid_ranks, Case(f"own {kind}")):
        assert len(calls["gather"]) == forwards * collectives
        assert len(calls["scatter"]) == collectives
        assert sum(calls["gather"]) == forwards * sum(calls["scatter"])


@pytest.mark.integration
@pytest.mark.parametrize("kind", STATES)
def test_zigzag_gives_the_states_of_two_runs_and_contiguous_ranks_of_one(
    hybrid_ranks: Path, kind: str
) -> None:
    two, one = (calls_of(hybrid_ranks, Case(f"own {kind}", x)) for x in ("zigzag", "contiguous"))
    assert [sum(calls["gather"]) for calls in two] == [2 * sum(calls["gather"]) for calls in one]
