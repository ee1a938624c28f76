"""How many held-out samples a validation reads."""

from __future__ import annotations

from flashtrain.training.validation_share import describe_validation, held_out_samples


def test_a_validation_takes_a_tenth_of_the_training_between_two_of_them() -> None:
    # 100 steps of 64 samples are 6,400; a forward costs a third of a step, so a tenth of the time reads 1,920.
    assert held_out_samples(None, every=100, batch=64) == 1920
    assert held_out_samples(None, every=1, batch=1) == 1


def test_what_was_asked_for_is_read_and_a_bound_of_its_own_holds() -> None:
    assert held_out_samples(20_000, every=100, batch=64) == 20_000
    assert held_out_samples(None, every=100, batch=64, most=512) == 512


def test_the_line_names_the_setting_only_where_the_number_was_chosen() -> None:
    assert describe_validation(1920, None, 100, "data.validation_tokens") == (
        "validation: 1,920 held-out samples every 100 steps, at most about a tenth of the training's time; "
        "data.validation_tokens= reads others"
    )
    assert describe_validation(512, 512, 100, "data.validation_tokens") == (
        "validation: 512 held-out samples every 100 steps"
    )
