"""How many held-out samples a validation reads."""

from __future__ import annotations

import pytest

from flashtrain.command.compose import compose_settings
from flashtrain.tasks.masked_language.prepare import make_masked_data
from flashtrain.training.hardware import detect_hardware
from flashtrain.training.validation import describe_validation, held_out_samples


def test_a_validation_takes_a_tenth_of_the_training_unless_its_samples_or_a_bound_are_given() -> (
    None
):
    # 100 steps of 64 samples are 6,400; a forward costs a third of a step, so a tenth of
    # the time reads 1,920.
    assert held_out_samples(None, every=100, batch=64) == 1920
    assert held_out_samples(None, every=1, batch=1) == 1
    assert held_out_samples(20_000, every=100, batch=64) == 20_000
    assert held_out_samples(None, every=100, batch=64, maximum=512) == 512


def test_the_line_names_the_setting_only_where_the_number_was_chosen() -> None:
    line = describe_validation(1920, None, 100, "data.validation_tokens")
    assert line.startswith("validation: 1,920 held-out samples every 100 steps (")
    assert "data.validation_tokens=" in line
    assert (
        describe_validation(1, 512, 100, "data.validation_tokens")
        == "validation: 1 held-out sample every 100 steps"
    )


@pytest.mark.parametrize(("asked", "samples"), [([], 12), (["masked.validation_samples=3"], 3)])
def test_a_masked_trainings_validation_is_bounded_too(asked, samples):
    words = ["recipe=bert", "context=128", "trainer.tokens_per_step=512", "masked.token_budget=512"]
    settings = compose_settings(
        [*words, "trainer.validate_every=10", "hardware.demo=never", *asked]
    )
    data = make_masked_data(settings, detect_hardware("cpu"))
    assert data.validation_samples == samples  # 0.3 x 10 steps x 4 samples
