"""Report a run's progress as plain lines on standard error, in a terminal and in a log."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ProgressBar

from flashtrain.announce import is_quiet
from flashtrain.training.steps import OptimizerStepCounter, log_interval

SECONDS = 10.0  # between two lines of a long validation, or of a long first step


class LineProgress(ProgressBar):
    """Prints lines such as "step 100/500 loss 2.345 lr 3.0e-04 tokens/s 450,123 0:12:03 left".

    A line is printed for the first step, every N steps and for the last step. The loss of other
    steps is not read, because reading a loss makes the host wait for the device. Lightning's
    own bars (2.6.6) read it at each micro-batch, count an epoch's micro-batches, and in a pipe
    or a file show no loss.

    Args:
        every_n_steps: optimizer steps between two lines; None: the trainer's log interval.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__()
        self.every_n_steps = every_n_steps
        self._enabled = not is_quiet()
        self._steps = OptimizerStepCounter()
        self._first_step = 0
        # Of the current step's micro-batches. Lightning has divided each by their number, so
        # the sum is the mean.
        self._losses: list[torch.Tensor] = []
        self._rate: float | None = None
        self._printed_step, self._printed_time = 0, 0.0
        self._validation_began = self._validation_printed = 0.0
        self._paused: float | None = None  # since when a validation runs or a checkpoint is saved

    def disable(self) -> None:
        """Stop printing. Lightning calls this on every rank but the first."""
        self._enabled = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps.start(trainer)
        self._losses.clear()
        self._first_step = self._printed_step = trainer.global_step
        self._printed_time = self._printed_within = time.perf_counter()
        self._paused = None

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        # Read here: when the step has ended, the schedule has already set the next one's.
        # torchao's AdamW has a tensor, which the schedule changes.
        rates = [float(one.param_groups[0]["lr"]) for one in trainer.optimizers]
        self._rate = rates[0] if rates else None
        if self._paused is not None:  # the time left follows from the time of the steps alone
            self._printed_time += time.perf_counter() - self._paused
            self._paused = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any, **__: Any
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self._enabled and isinstance(loss, torch.Tensor):
            self._losses.append(loss)
        if not self._steps.ended(trainer):
            return self._print_within(trainer)
        step, interval = trainer.global_step, self.every_n_steps or log_interval(trainer)
        if self._enabled and (
            step % interval == 0 or step in (self._first_step + 1, _total_steps(trainer))
        ):
            self._print_step(trainer)
        self._losses.clear()

    def _print_within(self, trainer: pl.Trainer) -> None:
        """Report the micro-batches of a long first step; lines of later ones say how long it is."""
        now, done, total = time.perf_counter(), len(self._losses), trainer.accumulate_grad_batches
        long = now - self._printed_within > SECONDS
        if long and done and trainer.global_step == self._first_step:
            self._printed_within = now
            left = _left((now - self._printed_time) / done * (total - done))
            self.print(f"step {self._first_step + 1} micro-batch {done}/{total} {left}")

    def _print_step(self, trainer: pl.Trainer) -> None:
        step, total, now = trainer.global_step, _total_steps(trainer), time.perf_counter()
        # With several ranks the logged loss is the mean over all; this rank has computed only
        # its part of the step.
        logged = trainer.world_size > 1 and (step % log_interval(trainer) == 0 or step == 1)
        loss = trainer.callback_metrics.get("train_loss") if logged else None
        if loss is None and self._losses:
            loss = torch.stack(self._losses).sum()
        speed = trainer.callback_metrics.get("tokens_per_second")  # logged by Throughput
        parts = [f"step {step}" if total is None else f"step {step}/{total}"]
        parts += [] if loss is None else [f"loss {float(loss):.3f}"]
        parts += [] if self._rate is None else [f"lr {self._rate:.1e}"]
        parts += [f"tokens/s {float(speed):,.0f}"] if speed else []
        # The first step compiles: no remaining time is estimated from it.
        if total is not None and step > self._first_step + 1:
            parts.append(
                _left((now - self._printed_time) / (step - self._printed_step) * (total - step))
            )
        self.print(*parts)
        self._printed_step, self._printed_time = step, now

    def on_save_checkpoint(self, *_: Any, **__: Any) -> None:
        self._paused = self._paused or time.perf_counter()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation_began = self._validation_printed = time.perf_counter()
        self._paused = self._paused or self._validation_began
        self._batches = trainer.num_test_batches if trainer.testing else trainer.num_val_batches
        if trainer.state.fn != "fit":
            self.print(f"validating 0/{self._batches[0]}")

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
        if trainer.sanity_checking or now - self._validation_printed < SECONDS:
            return
        self._validation_printed = now
        done, total = batch_idx + 1, self._batches[dataloader_idx]
        left = _left((now - self._validation_began) / done * (total - done))
        self.print(*_step(trainer), f"validating {done}/{total} {left}")

    on_test_start, on_test_batch_end = on_validation_start, on_validation_batch_end

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loss = trainer.callback_metrics.get("validation_loss")
        if loss is not None and not trainer.sanity_checking and trainer.state.fn == "fit":
            self.print(*_step(trainer), f"validation loss {float(loss):.3f}")

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._enabled:
            print(*args, file=sys.stderr, flush=True)


def _total_steps(trainer: pl.Trainer) -> int | None:
    """Return the number of optimizer steps after which the fit ends; None if it has no end."""
    total = trainer.estimated_stepping_batches
    return int(total) if total != float("inf") and total > 0 else None


def _left(seconds: float) -> str:
    return f"{timedelta(seconds=round(seconds))} left"


def _step(trainer: pl.Trainer) -> list[str]:
    return [f"step {trainer.global_step}"] if trainer.state.fn == "fit" else []
