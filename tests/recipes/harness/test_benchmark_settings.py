"""Settings of benchmarks that cannot be: refused by their name before anything is
started, with the nearest."""

from __future__ import annotations

import pytest

from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError

WRONG = {
    "attention-benchmark": (
        "rows=anchor", "implementations=[]", "seqlens=[0]", "head_dims=[520]", "densities=[0]",
        "max_seconds=0",
        "dtype=fp8", "seqlen=[1]",
    ),
    "gpt2-speed": (
        "models=[125m]", "weights=[fp16]", "contexts=[]", "batches=[0]", "steps=0",
        "command_steps=5",
    ),
    "hf-speed": ("models=[124m]",),  # of GPT-2
    "long-context-benchmark": (
        "methods=[rings]", "layouts=[zigzg]", "masks=[block-random]", "shapes=[16]",
        "shapes=[16/3x64]", "degrees=[1]",
        "degrees=[]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "word"), [(recipe, word) for recipe, words in WRONG.items() for word in words]
)
def test_a_setting_that_cannot_be_is_named(recipe: str, word: str) -> None:
    with pytest.raises(UserError, match=f"benchmark.{word.partition('=')[0]}"):
        compose_settings([f"recipe={recipe}", f"benchmark.{word}"])


@pytest.mark.parametrize("recipe", ["attention-benchmark", "long-context-benchmark"])
def test_a_mask_that_is_not_known_is_refused_with_the_nearest(recipe: str) -> None:
    with pytest.raises(UserError, match="'causal'"):
        compose_settings([f"recipe={recipe}", "benchmark.masks=[casual]"])


def test_lengths_of_units_or_full_rows_are_needed() -> None:
    with pytest.raises(UserError, match=r"benchmark\.(contexts|sample_units)=\[\]"):
        compose_settings(
            ["recipe=bert-speed", "benchmark.contexts=[]", "benchmark.sample_units=[]"]
        )
