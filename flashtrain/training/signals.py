"""SIGTERM, Ctrl-C, or time that is up: finish the optimiser step, leave a checkpoint, stop cleanly.

pytorch-lightning 2.6.6 does not: at a SIGTERM between two accumulated micro-batches its checkpoint has lost their
gradients (other weights in 4 of 4 runs), one that reaches rank 1 alone leaves the job hanging, and the command ends
with status 0.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist

from flashtrain.training.checkpoint_callbacks import SaveLast
from flashtrain.training.steps import OptimizerStepCounter

AGREE_SECONDS = 1.0  # how often ranks ask each other whether one of them was told to stop
MOST_STEPS = 100  # and at the latest after so many optimiser steps, or batches of a validation
TIME_IS_UP = 1000  # what ranks tell each other beside the numbers of signals


class StoppedInValidation(Exception):
    """A signal, or time that was up, ended a validation or test midway. Trainer.fit, .validate or .test raise it."""


class SaveOnSignal(pl.Callback):
    """On SIGTERM or Ctrl-C (SIGINT): finish the current optimiser step, write last.ckpt (by the Trainer's SaveLast, if
    it has one), and end the fit.

    In a validation or a test the batch is finished instead, last.ckpt written where the Trainer fits, and
    StoppedInValidation raised: half a validation has no result, and must not be waited for.

    until: the moment of time.time() after which the fit ends in the same way; `out_of_time` then says so.

    Afterwards `stopped_by` is the signal (None where the fit ended by itself), `stopped_at` the optimiser step, and
    `exit_code` what a command should exit with (143 for SIGTERM, 130 for Ctrl-C). A second Ctrl-C does not wait: it
    raises KeyboardInterrupt at once. No validation is run on the way out.

    Several ranks: a signal may reach only some of them, and at different steps. About once a second they compare, by a
    two-number all-reduce between the hosts' CPUs, and all stop after the same step.

    While it trains, this callback's handlers stand in for Lightning's SIGTERM handler (which stops in the middle of
    accumulating gradients and saves nothing), and Lightning's own per-batch broadcast of that handler's flag, which
    makes every rank wait for its device at every batch, is switched off. Before and after, the handlers are as they
    were. Outside the main thread, where Python allows no handlers, the callback does nothing.
    """

    def __init__(self, *, until: float | None = None) -> None:
        super().__init__()
        self.until = until
        self.out_of_time = False
        self._late: tuple[int, int] | None = None
        self.stopped_by: signal.Signals | None = None
        self.stopped_at: int | None = None
        self._received: signal.Signals | None = None
        self._interrupts = 0
        self._previous: dict[signal.Signals, Any] = {}
        self._steps = OptimizerStepCounter()
        self._group: Any = None
        self._speaks = False
        self._steps_to_agreement = 1
        self._agreed_at = 0.0
        self._asked = 0  # how often this rank could have asked since
        self._shared_batches = 0  # of the evaluation under way: every rank has so many
        self._validation_limit: Any = None

    @property
    def exit_code(self) -> int:
        """0 where the fit ended by itself, else 128 + the signal's number, as shells have it."""
        return 0 if self.stopped_by is None else 128 + int(self.stopped_by)

    # ---------------------------------------------------------------- Lightning hooks
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.stopped_by, self.stopped_at, self._received, self.out_of_time = None, None, None, False
        self._interrupts, self._late = 0, None
        self._steps.start(trainer)
        self._begin(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_evaluation(trainer, trainer.num_val_batches)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_evaluation(trainer, trainer.num_test_batches)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._end_evaluation_batch(trainer, batch_idx, dataloader_idx)

    on_test_batch_end = on_validation_batch_end

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._steps.ended(trainer):
            return
        told = self._agree()
        if told is None:
            return
        if trainer.global_step == trainer.max_steps:  # the fit is over anyway
            self._late = (told, trainer.global_step)
            return
        self._note(told, trainer.global_step)
        self._save(trainer)
        # Lightning validates once more when it is told to stop; whoever sent a signal does not want to wait for that.
        self._validation_limit = trainer.limit_val_batches
        trainer.limit_val_batches = 0
        trainer.fit_loop.min_epochs = 0
        trainer.fit_loop.epoch_loop.min_steps = None
        trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._restore(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore(trainer)
        if isinstance(exception, KeyboardInterrupt) and self.stopped_by is None:
            self.stopped_by, self.stopped_at = signal.SIGINT, trainer.global_step

    def take_late(self, trainer: pl.Trainer) -> None:
        """For a program that goes on after this fit: what came at its last step, or in the validation after it, counts
        as having stopped it. Every rank calls this."""
        if self._late is None:
            self._steps_to_agreement = 1
            told = self._agree()
            self._late = None if told is None else (told, trainer.global_step)
        if self._late is not None:
            self._note(*self._late)

    # ---------------------------------------------------------------- inside
    def _begin(self, trainer: pl.Trainer) -> None:
        """Listen from here on."""
        self._speaks = trainer.is_global_zero
        self._steps_to_agreement, self._agreed_at, self._asked = 1, time.monotonic(), 0
        if trainer.world_size > 1 and dist.is_initialized() and self._group is None:
            # A group of its own on the CPU: asking must not wait for the work queued on a GPU.
            self._group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        if self._group is not None and trainer.state.fn == "fit":
            _silence_lightning(trainer)
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._on_signal)

    def _begin_evaluation(self, trainer: pl.Trainer, batches: Any) -> None:
        if trainer.state.fn != "fit" and not self._previous:
            self._begin(trainer)
        count = sum(int(number) for number in batches if number != float("inf"))
        if self._group is not None:  # a rank may have a batch more, after which nobody would answer it
            least = torch.tensor(count, dtype=torch.int64)
            dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
            count = int(least)
        self._shared_batches = count

    def _end_evaluation_batch(self, trainer: pl.Trainer, batch_idx: int, dataloader_idx: int) -> None:
        listens = self._previous or self._group is not None
        if trainer.sanity_checking or not listens or dataloader_idx or batch_idx >= self._shared_batches:
            return
        told = self._agree()
        if told is None:
            return
        self._note(told, trainer.global_step)
        if trainer.state.fn == "fit":
            self._save(trainer)
        raise StoppedInValidation(f"stopped in a validation after step {trainer.global_step}")

    def _note(self, told: int, step: int) -> None:
        self.stopped_at = step
        if told == TIME_IS_UP:
            self.out_of_time = True
        else:
            self.stopped_by = signal.Signals(told)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT  # a sweep passes a SIGTERM on beside the terminal's Ctrl-C
        if self._interrupts > 1:
            raise KeyboardInterrupt
        if self._received is None and self._speaks:
            name = signal.Signals(number).name
            line = f"\n{name}: this step is finished and the checkpoint written (Ctrl-C again: not even that)\n"
            with contextlib.suppress(OSError):  # the terminal is gone
                os.write(2, line.encode())  # not print: what was interrupted may be printing
        self._received = signal.Signals(number)

    def _told(self) -> int:
        """The number of the signal that this rank received, TIME_IS_UP, or 0."""
        if self._received is not None:
            return int(self._received)
        return TIME_IS_UP if self.until is not None and time.time() >= self.until else 0

    def _agree(self) -> int | None:
        """What any rank was told, the same answer on every rank; None for nothing."""
        if self._group is None:
            return self._told() or None
        self._steps_to_agreement -= 1
        self._asked += 1
        if self._steps_to_agreement > 0:
            return None
        now = time.monotonic()
        seconds_per_step = (now - self._agreed_at) / self._asked
        wanted = min(MOST_STEPS, max(1, int(AGREE_SECONDS / max(seconds_per_step, 1e-6))))
        # Every rank proposes when to ask next; the largest proposal holds for all, so that they ask at the same step.
        both = torch.tensor([self._told(), wanted], dtype=torch.int64)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        number, self._steps_to_agreement = both.tolist()
        self._agreed_at, self._asked = now, 0
        return number or None

    def _save(self, trainer: pl.Trainer) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, SaveLast):
                callback.save(trainer)
                return

    def _restore(self, trainer: pl.Trainer) -> None:
        for number, handler in self._previous.items():
            # None: set by other than Python; it cannot be put back, and the default stands in.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
        if self._validation_limit is not None:
            trainer.limit_val_batches = self._validation_limit
            self._validation_limit = None


def _silence_lightning(trainer: pl.Trainer) -> None:
    """Switch off the broadcast that Lightning 2.6 makes before every batch to spread its SIGTERM flag.

    It reads the answer back from the device, so that the host could never run ahead of the GPU; its flag is never set
    while our handlers stand. Versions without that method have nothing to switch off.
    """
    loop = trainer.fit_loop.epoch_loop
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
