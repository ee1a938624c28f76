"""Progress of a run: a bar in a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ProgressBar, RichProgressBar

from flashtrain.announce import is_quiet
from flashtrain.training.steps import OptimizerStepCounter, log_interval
from flashtrain.training.throughput import Throughput

VALIDATION_SECONDS = 10.0  # between two lines of a long validation


def make_progress(every_n_steps: int | None = None, terminal: bool | None = None) -> ProgressBar:
    """The progress callback for the output: StepBar in a terminal, else LineProgress.

    Args:
        every_n_steps: optimiser steps between two readings of the loss; None: the trainer's log interval.
        terminal: whether standard error is a terminal; None: look.
    """
    if terminal is None:
        terminal = sys.stderr.isatty()
    progress = StepBar(every_n_steps) if terminal else LineProgress(every_n_steps)
    if is_quiet():
        progress.disable()
    return progress


class StepReader:
    """Reads loss, learning rate and speed of the first, the last and every N-th optimiser step.

    It reads no others, because reading a loss makes the host wait for the device.
    """

    def __init__(self, every_n_steps: int | None) -> None:
        self.every_n_steps = every_n_steps
        self.first_step = 0
        self._steps = OptimizerStepCounter()
        # Of the current step's micro-batches. Lightning has divided each by their number, so the sum is the mean.
        self._losses: list[torch.Tensor] = []
        self._rate: float | None = None

    def start(self, trainer: pl.Trainer) -> None:
        self._steps.start(trainer)
        self.first_step = trainer.global_step
        self._losses.clear()

    def begin_batch(self, trainer: pl.Trainer) -> None:
        # Read here: when the step has ended, the schedule has already set the next one's.
        self._rate = trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None

    def end_batch(self, trainer: pl.Trainer, outputs: Any) -> dict[str, str] | None:
        """The texts to show, by name; {} if none are due, None within a step."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):
            self._losses.append(loss)
        if not self._steps.ended(trainer):
            return None
        step, interval = trainer.global_step, self.every_n_steps or log_interval(trainer)
        due = step % interval == 0 or step in (self.first_step + 1, total_steps(trainer))
        shown = self._read(trainer) if due else {}
        self._losses.clear()
        return shown

    def _read(self, trainer: pl.Trainer) -> dict[str, str]:
        # With several ranks the logged loss is the mean over all; this rank has computed only its part of the step.
        step = trainer.global_step
        logged = trainer.world_size > 1 and (step % log_interval(trainer) == 0 or step == 1)
        loss = trainer.callback_metrics.get("train_loss") if logged else None
        if loss is None and self._losses:
            loss = torch.stack(self._losses).sum()
        speed = _tokens_per_second(trainer)
        shown = {
            "loss": None if loss is None else f"{float(loss):.3f}",
            "lr": None if self._rate is None else f"{self._rate:.1e}",
            "tokens/s": f"{speed:,.0f}" if speed else None,
        }
        return {name: text for name, text in shown.items() if text is not None}


class LineProgress(ProgressBar):
    """Plain lines, for logs: "step 100/500 loss 2.345 lr 3.0e-04 tokens/s 450,123 0:12:03 left".

    There is one line for the first step, one every N steps and one for the last, on standard error. Written to a pipe
    or a file, Lightning's own bars (2.6.6) show no loss: 146 bytes for 60 steps (rich) or carriage returns (tqdm).
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__()
        self._enabled = True
        self._reader = StepReader(every_n_steps)
        self._read_step, self._read_time = 0, 0.0
        self._validation_began = self._validation_printed = 0.0

    def disable(self) -> None:
        """Called by Lightning on every rank but the first."""
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._reader.start(trainer)
        self._read_step, self._read_time = trainer.global_step, time.perf_counter()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._reader.begin_batch(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        shown = self._reader.end_batch(trainer, outputs) if self._enabled else None
        if shown:
            step, total, now = trainer.global_step, total_steps(trainer), time.perf_counter()
            parts = [f"step {step}" if total is None else f"step {step}/{total}"]
            parts += [f"{name} {text}" for name, text in shown.items()]
            # The first step compiles: no remaining time is estimated from it.
            if total is not None and step > self._reader.first_step + 1:
                parts.append(_left((now - self._read_time) / (step - self._read_step) * (total - step)))
            self.print(*parts)
            self._read_step, self._read_time = step, now

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation_began = self._validation_printed = time.perf_counter()

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        now = time.perf_counter()
        if trainer.sanity_checking or now - self._validation_printed < VALIDATION_SECONDS:
            return
        self._validation_printed = now
        done, total = batch_idx + 1, trainer.num_val_batches[dataloader_idx]
        left = _left((now - self._validation_began) / done * (total - done))
        self.print(*_step(trainer), f"validating {done}/{total} {left}")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loss = trainer.callback_metrics.get("validation_loss")
        if loss is not None and not trainer.sanity_checking and trainer.state.fn == "fit":
            self.print(*_step(trainer), f"validation loss {float(loss):.3f}")

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._enabled:
            print(*args, file=sys.stderr, flush=True)


class StepBar(RichProgressBar):
    """Lightning's bar over the run's optimiser steps, with loss, learning rate and tokens/s.

    Lightning's own (2.6.6) counts an epoch's micro-batches, and waits for the device at each to read its figures.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(refresh_rate=5, console_kwargs={"stderr": True})
        self._reader = StepReader(every_n_steps)
        self._shown: dict[str, Any] = {}

    @property
    def total_train_batches(self) -> int | float:
        total = total_steps(self.trainer)
        return float("inf") if total is None else total

    def _get_train_description(self, current_epoch: int) -> str:
        return "step"

    def configure_columns(self, trainer: pl.Trainer) -> list[Any]:
        """Lightning's columns without steps per second, and a shorter bar."""
        columns = super().configure_columns(trainer)[:-1]
        columns[1].bar_width = 16
        return columns

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._reader.start(trainer)
        if self.progress is not None:
            self.progress.speed_estimate_period = 3600  # seconds: a step may take minutes, and rich looks 30 s back

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep one bar through all epochs."""
        if self.train_progress_bar_id is None:
            super().on_train_epoch_start(trainer, pl_module)
            self._update(self.train_progress_bar_id, trainer.global_step)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._reader.begin_batch(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        shown = self._reader.end_batch(trainer, outputs) if self.is_enabled else None
        if shown is not None:
            self._shown = {**self._shown, **shown}
            super().on_train_batch_end(trainer, pl_module, outputs, batch, trainer.global_step - 1)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loss = trainer.callback_metrics.get("validation_loss")
        if loss is not None and not trainer.sanity_checking:
            self._shown = {**self._shown, "validation loss": f"{float(loss):.3f}"}
        super().on_validation_end(trainer, pl_module)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        return self._shown


def total_steps(trainer: pl.Trainer) -> int | None:
    """The number of optimiser steps at which the fit ends; None if it has no end."""
    total = trainer.estimated_stepping_batches
    return int(total) if total != float("inf") and total > 0 else None


def _left(seconds: float) -> str:
    return f"{timedelta(seconds=round(seconds))} left"


def _step(trainer: pl.Trainer) -> list[str]:
    return [f"step {trainer.global_step}"] if trainer.state.fn == "fit" else []


def _tokens_per_second(trainer: pl.Trainer) -> float | None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Throughput):
            return callback.latest.get("tokens_per_second")
    return None
