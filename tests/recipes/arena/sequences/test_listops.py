"""ListOps: every expression has the value that its label says, is well formed, of the wanted
length, and there once."""

from __future__ import annotations

import numpy as np
import pytest

from flashtrain.errors import UserError
from flashtrain_recipes.arena.listops import ListOps

COUNTS = {"train": 120, "validation": 20, "test": 20}
NAMES = {11: "MIN", 12: "MAX", 13: "MED", 14: "SM"}
VALUES = {
    "MIN": min,
    "MAX": max,
    "MED": lambda found: int(np.median(found)),
    "SM": lambda found: sum(found) % 10,
}


@pytest.fixture(scope="module")
def listops() -> ListOps:
    return ListOps(3, counts=COUNTS)


def expressions(source: ListOps, split: str) -> list[tuple[list[int], int]]:
    samples = source.split(split)
    batch = samples[list(range(len(samples)))]
    return [
        (row[:length].tolist(), label)
        for row, length, label in zip(
            batch["tokens"], batch["lengths"], batch["labels"].tolist(), strict=True
        )
    ]


def value(symbols: list[int]) -> int:
    """Evaluate by a stack; checks the form on the way."""
    stack: list = []
    for symbol in symbols:
        if symbol == 15:
            found = []
            while isinstance(stack[-1], int):
                found.append(stack.pop())
            assert 2 <= len(found) <= 10
            stack.append(VALUES[stack.pop()](found))
        else:
            stack.append(NAMES[symbol] if symbol in NAMES else symbol - 1)
    (result,) = stack
    return result


def depth(symbols: list[int]) -> int:
    deepest = now = 0
    for symbol in symbols:
        now += (symbol in NAMES) - (symbol == 15)
        deepest = max(deepest, now)
    return deepest


def test_every_label_is_the_expressions_value(listops) -> None:
    for symbols, label in expressions(listops, "train"):
        assert value(symbols) == label


def test_lengths_and_depths_are_the_arenas(listops) -> None:
    found = [
        symbols
        for split in ("train", "validation", "test")
        for symbols, _ in expressions(listops, split)
    ]
    assert all(500 < len(symbols) < 2000 for symbols in found)
    assert max(depth(symbols) for symbols in found) == 9  # digits only at depth 10


def test_no_expression_comes_twice_in_any_split(listops) -> None:
    found = [
        tuple(symbols)
        for split in ("train", "validation", "test")
        for symbols, _ in expressions(listops, split)
    ]
    assert len(set(found)) == len(found) == 160


def test_a_seed_gives_the_same_expressions_wherever_they_are_made(listops) -> None:
    assert expressions(ListOps(3, counts=COUNTS), "test") == expressions(listops, "test")
    assert expressions(ListOps(4, counts=COUNTS), "test") != expressions(listops, "test")


def test_lengths_that_no_expression_has_are_one_line() -> None:
    with pytest.raises(UserError, match="longer than 500"):
        ListOps(shortest=500, longest=500)
