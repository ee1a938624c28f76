"""A resumed run makes up for a validation that it missed, and for none that was made."""

from __future__ import annotations

import pytest
import pytorch_lightning as pl
from tiny_training import TinyData, TinyTask, tiny_trainer

from flashtrain.training.validation import DueValidation


class Validated(pl.Callback):
    """The steps after which was validated."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_start(self, trainer, pl_module) -> None:
        self.steps.append(trainer.global_step)


@pytest.mark.parametrize(("validated", "expected"), [(True, [4]), (False, [2, 4])])
def test_a_step_is_validated_once_whether_its_run_was_resumed_or_not(
    tmp_path, validated, expected
) -> None:
    options = {"limit_val_batches": 1, "val_check_interval": 2 if validated else 3}
    first = tiny_trainer(tmp_path, DueValidation(2), max_steps=2, **options)
    first.fit(TinyTask(), datamodule=TinyData())
    first.save_checkpoint(tmp_path / "two.ckpt")
    seen = Validated()
    again = tiny_trainer(
        tmp_path, DueValidation(2), seen, max_steps=4, limit_val_batches=1, val_check_interval=2
    )
    again.fit(TinyTask(), datamodule=TinyData(), ckpt_path=tmp_path / "two.ckpt", weights_only=True)
    assert seen.steps == expected
