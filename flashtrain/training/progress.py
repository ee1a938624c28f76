"""What a user sees while a run trains: a bar in a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flashtrain.announce import is_quiet
from flashtrain.training.steps import OptimizerStepCounter, log_interval
from flashtrain.training.throughput import Throughput

REFRESH_SECONDS = 0.2
VALIDATION_SECONDS = 10.0  # between two words about a validation that takes long


def make_progress(every_n_steps: int | None = None, terminal: bool | None = None) -> ProgressBar:
    """The progress callback that suits where the output goes: TerminalProgress in a terminal, else LineProgress.

    every_n_steps: optimiser steps between two lines (or two readings of the loss, in a terminal); None takes the
    trainer's log interval. terminal: None looks whether standard error is one.
    """
    if terminal is None:
        terminal = sys.stderr.isatty()
    progress = TerminalProgress(every_n_steps) if terminal else LineProgress(every_n_steps)
    if is_quiet():
        progress.disable()
    return progress


class _StepProgress(ProgressBar):
    """What both kinds share: counts optimiser steps and reads loss, learning rate and speed every N of them.

    Reading the loss makes the host wait for the device, so it is done at the interval only.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__()
        self.every_n_steps = every_n_steps
        self._enabled = True
        self._steps = OptimizerStepCounter()
        self._first_step = 0
        self._read_step, self._read_time = 0, 0.0
        # Of the current step's micro-batches; Lightning has divided each by their number, so that the sum is the mean.
        self._losses: list[torch.Tensor] = []
        self._rate: float | None = None
        self._validation_began = self._validation_told = 0.0

    def disable(self) -> None:
        """Called by Lightning on every rank but the first."""
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps.start(trainer)
        self._first_step = self._read_step = trainer.global_step
        self._read_time = time.perf_counter()
        if self._enabled:
            self._begin(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Read here: when the step has ended, the schedule has already set the next one's.
        self._rate = trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._enabled:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):
            self._losses.append(loss)
        if not self._steps.ended(trainer):
            return
        step, interval = trainer.global_step, self.every_n_steps or log_interval(trainer)
        due = step % interval == 0 or step == self._first_step + 1 or step == total_steps(trainer)
        self._advance(step, self._read(trainer) if due else None)
        self._losses.clear()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation_began = self._validation_told = time.perf_counter()

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
        if not self._enabled or trainer.sanity_checking or now - self._validation_told < VALIDATION_SECONDS:
            return
        self._validation_told = now
        done, total = batch_idx + 1, trainer.num_val_batches[dataloader_idx]
        left = clock((now - self._validation_began) / done * (total - done))
        step = f"step {trainer.global_step} " if trainer.state.fn == "fit" else ""
        self._advance_validation(f"{step}validating {done}/{total} {left} left")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._enabled and not trainer.sanity_checking and trainer.state.fn == "fit":
            losses = [value for name, value in trainer.callback_metrics.items() if name == "validation_loss"]
            if losses:
                self._say(f"step {trainer.global_step} validation loss {float(losses[0]):.3f}")

    def _read(self, trainer: pl.Trainer) -> str:
        parts = []
        # The logged one is that of all ranks, of which each computed another part of the step.
        logged = trainer.world_size > 1 and (
            trainer.global_step % log_interval(trainer) == 0 or trainer.global_step == 1
        )
        loss = trainer.callback_metrics.get("train_loss") if logged else None
        if loss is None and self._losses:
            loss = torch.stack(self._losses).sum()
        if loss is not None:
            parts.append(f"loss {float(loss):.3f}")
        if self._rate is not None:
            parts.append(f"lr {self._rate:.1e}")
        speed = _tokens_per_second(trainer)
        if speed:
            parts.append(f"{compact(speed)} tokens/s")
        now, step, total = time.perf_counter(), trainer.global_step, total_steps(trainer)
        # The first step compiles: what is left is not guessed from it.
        if total is not None and step > self._first_step + 1 and step > self._read_step:
            parts.append(f"{clock((now - self._read_time) / (step - self._read_step) * (total - step))} left")
        self._read_step, self._read_time = step, now
        return " ".join(parts)

    def _begin(self, trainer: pl.Trainer) -> None:
        """Training begins."""

    def _advance(self, step: int, reading: str | None) -> None:
        """Step `step` has ended; reading: the text of its figures, where they were read."""
        raise NotImplementedError

    def _advance_validation(self, reading: str) -> None:
        """A validation goes on; reading: how far it is."""
        self._say(reading)

    def _say(self, line: str) -> None:
        raise NotImplementedError


class LineProgress(_StepProgress):
    """Plain lines, for logs: "step 100/500 loss 2.345 lr 3.0e-04 450k tokens/s 12:03 left".

    One line for the first step, one every N steps, one for the last. Lines go to standard error.
    """

    def _begin(self, trainer: pl.Trainer) -> None:
        self._total = total_steps(trainer)

    def _advance(self, step: int, reading: str | None) -> None:
        if reading is not None:
            of = "" if self._total is None else f"/{self._total}"
            self._say(f"step {step}{of} {reading}")

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._enabled:
            print(*args, file=sys.stderr, flush=True)


class TerminalProgress(_StepProgress):
    """One bar over the run's optimiser steps, with loss, learning rate, tokens/s and the time left.

    rich draws it; Lightning's RichProgressBar counts micro-batches of an epoch instead of steps, and reads the shown
    metrics from the device at every batch.
    """

    def __init__(self, every_n_steps: int | None = None, console: Console | None = None) -> None:
        super().__init__(every_n_steps)
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._validation: Progress | None = None  # the bar of a validation that is no part of a fit

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        if self._enabled and trainer.state.fn == "validate":
            columns = (
                TextColumn("validating {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(),
                TimeRemainingColumn(),
            )
            self._validation = Progress(*columns, console=self._console, transient=True)
            self._validation.add_task("", total=sum(trainer.num_val_batches))
            self._validation.start()

    def on_validation_batch_end(self, *arguments: Any, **named: Any) -> None:
        if self._validation is None:
            super().on_validation_batch_end(*arguments, **named)
        else:
            self._validation.advance(self._validation.task_ids[0])

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_validation()
        super().on_validation_end(trainer, pl_module)

    def _stop_validation(self) -> None:
        if self._validation is not None:
            self._validation.stop()
            self._validation = None

    def _begin(self, trainer: pl.Trainer) -> None:
        total = total_steps(trainer)
        steps = "step {task.completed:.0f}" + ("" if total is None else "/{task.total:.0f}")
        self._bar = Progress(
            TextColumn(steps),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            refresh_per_second=1 / REFRESH_SECONDS,
        )
        self._task = self._bar.add_task("", total=total, completed=trainer.global_step)
        self._bar.start()

    def _advance(self, step: int, reading: str | None) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step)
            if reading is not None:
                self._bar.update(self._task, description=reading)

    def _advance_validation(self, reading: str) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=reading)

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False)

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._enabled:
            self._console.print(*args, highlight=False)

    def _stop(self) -> None:
        self._stop_validation()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()


def total_steps(trainer: pl.Trainer) -> int | None:
    """Optimiser steps at which the fit will have ended, None where it has no end."""
    total = trainer.estimated_stepping_batches
    return int(total) if total != float("inf") and total > 0 else None


def compact(number: float) -> str:
    """A large number in three digits: 512, 45.3k, 450k, 1.31M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:#.3g}".rstrip(".") + letter
    return f"{number:.0f}"


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _tokens_per_second(trainer: pl.Trainer) -> float | None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Throughput):
            return callback.latest.get("tokens_per_second")
    return None
