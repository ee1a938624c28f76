"""The learning curve of a whole training: a row at each validation, through all stages and pieces of the run."""

from __future__ import annotations

import csv
import io
import time
from pathlib import Path
from typing import Any, TypeGuard

import pytorch_lightning as pl

from flashtrain.announce import say
from flashtrain.errors import UserError
from flashtrain.files.disk import csv_value, write_atomically
from flashtrain.report.formats import is_finite
from flashtrain.tasks import SequenceClassification
from flashtrain_recipes.arena.stages import Stage

COLUMNS = (
    "stage", "side", "contour", "drawn_as", "step", "images", "train_accuracy", "validation_accuracy",
    "validation_loss", "minutes",
)  # fmt: skip


class LearningCurve(pl.Callback):
    """Appends a row to `path` (csv) after each validation while training, says it, and ends a stage that reached its
    `until`: a row of so high an accuracy is a stage's last, and that is all by which its early end is known.

    The rows travel in the checkpoint: a run that is resumed, from a file carried to another machine too, writes the
    whole curve. minutes: of fitting, all pieces together. images: read for training, all stages together. `begin_stage`
    is called before each stage's fit; one LearningCurve serves all stages.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self.rows: list[dict[str, Any]] = []
        self._stage: Stage | None = None
        self._images_before, self._seconds_before = 0, 0.0
        self._began: float | None = None

    def begin_stage(self, stage: Stage) -> None:
        """The stage that the next fit trains."""
        self._stage = stage
        self._images_before = max((row["images"] for row in self.rows if row["stage"] <= stage.number), default=0)

    def has_row(self, stage: Stage, step: int) -> bool:
        """Whether the stage was validated after so many steps."""
        return self._accuracy(stage, step) is not None

    def is_over(self, stage: Stage, step: int) -> bool:
        """Whether the stage ends with this step: with its last one, or with one that reached `until`."""
        return self.has_row(stage, step) and (step >= stage.steps or self._reached(stage, step))

    def made(self) -> dict[str, int]:
        """`steps` and `samples` of all stages so far, as of the last row; nothing where there is none."""
        last = {row["stage"]: row["step"] for row in self.rows}
        return {"steps": sum(last.values()), "samples": self.rows[-1]["images"]} if self.rows else {}

    @property
    def minutes(self) -> float:
        """Minutes of fitting so far, in all pieces."""
        running = 0.0 if self._began is None else time.monotonic() - self._began
        return (self._seconds_before + running) / 60

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began = time.monotonic()
        if self._reached(self._begun_stage(), trainer.global_step):
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seconds_before, self._began = 60 * self.minutes, None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or not isinstance(pl_module, SequenceClassification):
            return
        train = pl_module.take_train_accuracy()
        if train is None:  # nothing was trained since the last row
            return
        logged, stage, step = trainer.callback_metrics, self._begun_stage(), trainer.global_step
        images = stage.settings.pathfinder if stage.settings.sequence.data == "pathfinder" else None
        row = {
            "stage": stage.number + 1,
            "side": images.side if images else 0,
            "contour": images.contour if images else "",
            "drawn_as": (images.drawn_as if images else None) or "",
            "step": step,
            "images": self._images_before + step * stage.batch,
            "train_accuracy": round(train, 5),
            "validation_accuracy": round(float(logged["validation_accuracy"]), 5),
            "validation_loss": round(float(logged["validation_loss"]), 5),
            "minutes": round(self.minutes, 2),
        }
        # A resumed run repeats what it had done after its checkpoint.
        place = (row["stage"], row["step"])
        self.rows = [kept for kept in self.rows if (kept["stage"], kept["step"]) < place] + [row]
        if trainer.is_global_zero:
            self.write()
            found = (
                f"accuracy {row['validation_accuracy']:.2%} held out, {row['train_accuracy']:.2%} in training"
                if stage.settings.sequence.classification_weight
                else f"loss {row['validation_loss']:.4f} of what is masked, held out"
            )
            say(f"{stage.name}, step {step}, {row['images']:,} samples: {found}, {row['minutes']:.1f} min")
        if self._reached(stage, step):
            trainer.should_stop = True
            say(f"{stage.name}: until={stage.until:g} reached after {step:,} of {stage.steps:,} steps, it ends here")
        elif stage.until is not None and step >= stage.steps:
            say(f"{stage.name}: its {step:,} steps are over below until={stage.until:g}")

    def _begun_stage(self) -> Stage:
        if self._stage is None:
            raise RuntimeError("LearningCurve.begin_stage comes before a fit")
        return self._stage

    def _accuracy(self, stage: Stage, step: int) -> float | None:
        place = (stage.number + 1, step)
        return next((row["validation_accuracy"] for row in self.rows if (row["stage"], row["step"]) == place), None)

    def _reached(self, stage: Stage, step: int) -> bool:
        # Rows hold what all ranks together found, so that all of them end at one step.
        accuracy = self._accuracy(stage, step)
        return stage.until is not None and accuracy is not None and accuracy >= stage.until

    def write(self) -> None:
        """Write the csv file."""
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: csv_value(value) for key, value in row.items()} for row in self.rows)
        write_atomically(self.path, text.getvalue())

    def state_dict(self) -> dict[str, Any]:
        return {"rows": [dict(row) for row in self.rows], "seconds": 60 * self.minutes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rows, seconds = state_dict.get("rows"), state_dict.get("seconds")
        if not isinstance(rows, list) or not all(map(_is_row, rows)) or not _is_number(seconds):
            raise UserError(
                "the checkpoint's learning curve is damaged: its rows must have numbers or short words under "
                f"{', '.join(COLUMNS)}."
            )
        self.rows = [dict(row) for row in rows]
        self._seconds_before = float(seconds)


_WORDS = ("contour", "drawn_as")
_LONGEST_WORD = 100


def _is_row(row: Any) -> bool:
    """Whether this is a row of a curve: a checkpoint may come from anywhere."""
    if not isinstance(row, dict) or not set(COLUMNS) - {"drawn_as"} <= set(row) <= set(COLUMNS):
        return False
    return all(_is_number(value) or (key in _WORDS and _is_word(value)) for key, value in row.items())


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_WORD


def _is_number(value: Any) -> TypeGuard[float]:
    if isinstance(value, int):
        return not isinstance(value, bool) and is_finite(value)
    return isinstance(value, float)  # NaN too: a loss may have been
