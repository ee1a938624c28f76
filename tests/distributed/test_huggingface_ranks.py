"""transformers models over gloo ranks are one process's, in float64: losses and all gradients, every way and layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed_ranks import of_ranks
from huggingface_ranks import MODELS, MORE, WAYS, Case, cases
from ranks import run_script

EXACT = 1e-10
# Layers of one kind share what is made ready for them: two where windows, or chunks, alternate with none.
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
            lines += [f"{case}: {name} is off by {error:.1e}" for name, error in errors.items() if not error <= EXACT]
    return lines


@pytest.mark.parametrize("model", [*MODELS, *MORE])
def test_losses_and_gradients_are_one_process(huggingface_ranks: Path, model: str) -> None:
    for folder, degree in (("two", 2), ("four", 4)):
        mine = [case for case in cases() if case.model == model and case.degree == degree]
        assert not (found := wrong(of_ranks(huggingface_ranks / folder, degree), mine)), "\n".join(found)


def test_each_model_meets_each_way_and_layout_and_most_batches() -> None:
    for model in MODELS:
        mine = [case for case in cases() if case.model == model]
        assert {case.way for case in mine} == set(WAYS)
        assert len({case.layout for case in mine}) == 3
        assert len({case.batch for case in mine}) >= 3
    assert {case.degree for case in cases()} == {2, 4}


EVERY = 11  # of some 1,300 cases, which take minutes: prime to the numbers of ways, layouts, batches and degrees


@pytest.mark.slow
def test_each_eleventh_of_all_cases_there_are(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("huggingface_ranks.py"))
    code, printed = run_script(script, tmp_path, str(EVERY), CUDA_VISIBLE_DEVICES="")
    assert code == 0, printed[-6000:]
    for model in (*MODELS, *MORE):
        for folder, degree in (("two", 2), ("four", 4)):
            mine = [case for case in cases(EVERY) if case.model == model and case.degree == degree]
            found = wrong(of_ranks(tmp_path / f"{model}-{folder}", degree), mine)
            assert not found, "\n".join(found)
