"""transformers models over gloo ranks are one process's, in float64: losses and all
gradients, every way and layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_ranks import MODELS, MORE, Case, cases
from ranks import of_ranks

EXACT = 1e-10
# Layers of one kind share what is made ready for them: two where windows, or chunks,
# alternate with none.
KINDS = {"gemma3": 2, "gemma2": 2, "gpt_oss": 2, "llama4": 2, "gemma4": 2}


def wrong(found: list[dict], mine: list[Case]) -> list[str]:
    """What of these cases is not exact, or not shared, on some rank."""
    lines = []
    for case in mine:
        for number, of_rank in enumerate(found):
            errors = dict(of_rank[str(case)])
            if errors.pop("kinds of attention") != KINDS.get(case.model, 1):
                lines.append(f"{case}: rank {number}: layers of a kind share no mask")
            # NaN is wrong too
            lines += [
                f"{case}: {name} is off by {error:.1e}"
                for name, error in errors.items()
                if not error <= EXACT
            ]
    return lines


@pytest.mark.integration
@pytest.mark.parametrize("model", [*MODELS, *MORE])
def test_losses_and_gradients_are_one_process(huggingface_ranks: Path, model: str) -> None:
    for folder, degree in (("two", 2), ("four", 4)):
        mine = [case for case in cases() if case.model == model and case.degree == degree]
        assert not (found := wrong(of_ranks(huggingface_ranks / folder, degree), mine)), "\n".join(
            found
        )
