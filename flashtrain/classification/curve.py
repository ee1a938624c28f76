"""The learning curve of a whole training: a row at each validation, through all stages and pieces of the run."""

from __future__ import annotations

import csv
import io
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from flashtrain.announce import say
from flashtrain.report.rows import write_atomically
from flashtrain.tasks import SequenceClassification

COLUMNS = ("stage", "side", "step", "images", "train_accuracy", "validation_accuracy", "validation_loss", "minutes")


class LearningCurve(pl.Callback):
    """Appends a row to `path` (csv) after each validation while training, and says it.

    The rows travel in the checkpoint: a run that is resumed, from a file carried to another machine too, writes the
    whole curve. minutes: of fitting, all pieces together. images: read for training, all stages together. `begin_stage`
    is called before each stage's fit; one LearningCurve serves all stages.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self.rows: list[dict[str, Any]] = []
        self._stage, self._side, self._batch = 0, 0, 1
        self._images_before, self._seconds_before = 0, 0.0
        self._began: float | None = None

    def begin_stage(self, number: int, side: int, batch: int, images_before: int) -> None:
        """The stage that the next fit trains. images_before: what earlier stages have read."""
        self._stage, self._side, self._batch, self._images_before = number, side, batch, images_before

    @property
    def minutes(self) -> float:
        """Minutes of fitting so far, in all pieces."""
        running = 0.0 if self._began is None else time.monotonic() - self._began
        return (self._seconds_before + running) / 60

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began = time.monotonic()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seconds_before, self._began = 60 * self.minutes, None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or not isinstance(pl_module, SequenceClassification):
            return
        train = pl_module.take_train_accuracy()
        if train is None:  # nothing was trained since the last row
            return
        found = trainer.callback_metrics
        row = {
            "stage": self._stage + 1,
            "side": self._side,
            "step": trainer.global_step,
            "images": self._images_before + trainer.global_step * self._batch,
            "train_accuracy": round(train, 5),
            "validation_accuracy": round(float(found["validation_accuracy"]), 5),
            "validation_loss": round(float(found["validation_loss"]), 5),
            "minutes": round(self.minutes, 2),
        }
        # A resumed run repeats what it had done after its checkpoint.
        place = (row["stage"], row["step"])
        self.rows = [kept for kept in self.rows if (kept["stage"], kept["step"]) < place] + [row]
        if trainer.is_global_zero:
            self.write()
            side = f"side {row['side']}, " if row["side"] else ""
            say(
                f"{side}step {row['step']}, {row['images']:,} samples: "
                f"accuracy {row['validation_accuracy']:.2%} held out, "
                f"{row['train_accuracy']:.2%} in training, {row['minutes']:.1f} min"
            )

    def write(self) -> None:
        """Write the csv file."""
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomically(self.path, text.getvalue())

    def state_dict(self) -> dict[str, Any]:
        return {"rows": [dict(row) for row in self.rows], "seconds": 60 * self.minutes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = [dict(row) for row in state_dict["rows"]]
        self._seconds_before = float(state_dict["seconds"])
