"""The course of a training in stages: learning curve, early end of a stage, its best
weights for the next one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from flashtrain.announce import say
from flashtrain.files.disk import write_atomically
from flashtrain.tasks import SequenceClassification
from flashtrain.tasks.training_task import metric
from flashtrain_recipes.arena.stages import Stage


class LearningCurve(pl.Callback):
    """Adds a row to the file `path`, a JSON object a line, after each validation,
    through all stages of a run.

    It also ends a stage whose held-out accuracy reached `stop_at_accuracy`. Checkpoints hold the
    rows, so that a resumed run writes the whole curve.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self.rows: list[dict[str, Any]] = []
        self.stage: Stage
        self._images_before, self._seconds_before = 0, 0.0
        self._began: float | None = None

    def begin_stage(self, stage: Stage) -> None:
        """Set the stage that the next fit trains."""
        self.stage = stage
        self._images_before = max(
            (row["images"] for row in self.rows if row["stage"] <= stage.number), default=0
        )

    def is_over(self, stage: Stage, step: int) -> bool:
        """Return whether the stage ends with this step: its last step, or one that
        reached `stop_at_accuracy`."""
        accuracy = self._accuracy(stage, step)
        return accuracy is not None and (step >= stage.steps or self._reached(stage, step))

    def made(self) -> dict[str, int]:
        """Return {"steps": ..., "samples": ...}, the numbers of all stages together up to the last
        row; {} before the first row."""
        last = {row["stage"]: row["step"] for row in self.rows}
        return (
            {"steps": sum(last.values()), "samples": self.rows[-1]["images"]} if self.rows else {}
        )

    @property
    def minutes(self) -> float:
        """Minutes of training so far, over all commands of the run."""
        running = 0.0 if self._began is None else time.monotonic() - self._began
        return (self._seconds_before + running) / 60

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began = time.monotonic()
        if self._reached(self.stage, trainer.global_step):
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seconds_before, self._began = 60 * self.minutes, None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or not isinstance(pl_module, SequenceClassification):
            return
        train = pl_module.take_train_accuracy()
        if train is None:  # nothing was trained since the last row
            return
        logged, stage, step = trainer.callback_metrics, self.stage, trainer.global_step
        images = stage.settings.pathfinder if stage.settings.sequence.data == "pathfinder" else None
        row = {
            "stage": stage.number + 1,
            "side": images.side if images else 0,
            "contour": images.contour if images else "",
            "step": step,
            "images": self._images_before + step * stage.batch,
            "train_accuracy": round(train, 5),
            "validation_accuracy": round(float(logged["validation_accuracy"]), 5),
            "validation_loss": round(float(logged["validation_loss"]), 5),
            "minutes": round(self.minutes, 2),
        }
        # A resumed run repeats what it had done after its checkpoint.
        place = (row["stage"], row["step"])
        self.rows = [
            before for before in self.rows if (before["stage"], before["step"]) < place
        ] + [row]
        if trainer.is_global_zero:
            self.write()
            found = f"loss {row['validation_loss']:.4f} of what is masked, held out"
            if stage.settings.sequence.classification_weight:
                unseen, seen = row["validation_accuracy"], row["train_accuracy"]
                found = f"accuracy {unseen:.2%} held out, {seen:.2%} in training"
            say(
                f"{stage.name}, step {step}, {row['images']:,} samples: "
                f"{found}, {row['minutes']:.1f} min"
            )
        if self._reached(stage, step):
            trainer.should_stop = True
            say(
                f"{stage.name}: ended, since stop_at_accuracy={stage.stop_at_accuracy:g} was "
                f"reached after {step:,} of {stage.steps:,} steps"
            )
        elif stage.stop_at_accuracy is not None and step >= stage.steps:
            say(
                f"{stage.name}: "
                f"ended after all {step:,} steps below stop_at_accuracy={stage.stop_at_accuracy:g}"
            )

    def _accuracy(self, stage: Stage, step: int) -> float | None:
        place = (stage.number + 1, step)
        return next(
            (
                row["validation_accuracy"]
                for row in self.rows
                if (row["stage"], row["step"]) == place
            ),
            None,
        )

    def _reached(self, stage: Stage, step: int) -> bool:
        # Rows hold what all ranks together found, so that all of them end at one step.
        accuracy = self._accuracy(stage, step)
        return (
            stage.stop_at_accuracy is not None
            and accuracy is not None
            and accuracy >= stage.stop_at_accuracy
        )

    def write(self) -> None:
        """Write all rows to the file, a JSON object a line."""
        write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))

    def state_dict(self) -> dict[str, Any]:
        return {"rows": [dict(row) for row in self.rows], "seconds": 60 * self.minutes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows, self._seconds_before = list(state_dict["rows"]), state_dict["seconds"]


class BestOfStage(pl.Callback):
    """Stores a stage's weights at its best validation; the next stage starts from them.

    A stage whose learning rate stays high can get worse again, even down to chance. Checkpoints
    hold the weights, so that a resumed run starts its next stage as an uninterrupted one does.

    Args:
        model: the model that is trained.
        monitor: the name of the logged value that decides.
        mode: whether its "max" or "min" is best.
    """

    def __init__(self, model: nn.Module, monitor: str, mode: str) -> None:
        super().__init__()
        self.model, self.monitor, self.sign = model, monitor, 1 if mode == "max" else -1
        self.score: float | None = None
        self.step = 0
        self._latest: float | None = None
        self._weights: dict[str, Tensor] = {}

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        score = metric(trainer, self.monitor)
        if trainer.sanity_checking or score is None:
            return
        self._latest = score
        if self.score is None or self.sign * score > self.sign * self.score:
            self.score, self.step = score, trainer.global_step
            self._weights = {
                name: value.detach().cpu().clone()
                for name, value in self.model.state_dict().items()
            }

    def restore(self) -> bool:
        """Load the best weights into the model, and return whether they
        differ from its latest ones."""
        if self.score is None or self._latest is None or self.score == self._latest:
            return False
        with torch.no_grad():
            self.model.load_state_dict(self._weights)
        return True

    def state_dict(self) -> dict[str, Any]:
        return {
            "score": self.score,
            "step": self.step,
            "latest": self._latest,
            "weights": self._weights,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.score = state_dict["score"]
        self.step = state_dict["step"]
        self._latest = state_dict["latest"]
        self._weights = dict(state_dict["weights"])
