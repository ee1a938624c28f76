"""Weights' names, FLOPs, memory estimates and losses are those that are written down.

`python tests/contract/pins.py` writes them anew.
"""

from __future__ import annotations

import json

import pytest
from pins import FILE, HUGGING_FACE, OWN, losses_and_gradients, memory_of, plans, weights_and_flops

PINS = json.loads(FILE.read_text(encoding="utf-8"))


def test_weights_have_their_names_and_shapes_and_models_their_flops() -> None:
    assert weights_and_flops() == PINS["weights and FLOPs"]


def test_losses_and_gradients_are_the_same() -> None:
    for family, numbers in losses_and_gradients().items():
        assert numbers == pytest.approx(PINS["losses"][family], rel=1e-6, abs=1e-4)


@pytest.mark.integration
@pytest.mark.parametrize("model", [" ".join(words) for words in [*OWN, *HUGGING_FACE]])
def test_memory_estimates_are_the_same_to_the_byte(model: str) -> None:
    found = {
        name: memory_of(words, machine)
        for name, words, machine in plans()
        if f" {model} " in f" {name} "
    }
    assert found
    assert found == {name: PINS["memory"][name] for name in found}
