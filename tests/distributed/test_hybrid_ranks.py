"""transformers' hybrids over gloo ranks are one process's, in float64: states and the tokens
before a convolution pass every border of ranks, and no border of documents."""

from __future__ import annotations

from pathlib import Path

import pytest
from hybrid_ranks import KINDS, LONG, MORE_LENGTHS, RECOMPUTED, Case, cases
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
                    if name != "sent"
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


@pytest.mark.integration
def test_what_is_sent_does_not_grow_with_the_sequence(hybrid_ranks: Path) -> None:
    for folder, degree in DEGREES.items():
        for of_rank in of_ranks(hybrid_ranks / folder, degree):
            for kind in MORE_LENGTHS:
                once, twice = (
                    of_rank[str(Case(kind, length=number * LONG))]["sent"] for number in (1, 2)
                )
                assert once == twice > 0
