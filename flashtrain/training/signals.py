"""A clean stop on a signal or at a time limit: finish the optimizer step, save a
checkpoint, end the fit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist

from flashtrain.interruption import Interrupted, handle, leave_closed_terminal, restore
from flashtrain.training.checkpoint_callbacks import SaveLast
from flashtrain.training.checkpoints import LAST, checkpoint_exists
from flashtrain.training.steps import OptimizerStepCounter

AGREE_SECONDS = 1.0  # between two exchanges in which ranks report whether they got a signal
MAX_STEPS_APART = 100  # optimizer steps, or batches of a validation, between two exchanges
TIME_IS_UP = 1000  # what a rank reports at its time limit, instead of a signal's number


class StoppedInValidation(Exception):
    """A signal or the time limit ended a validation or test midway. Raised by
    Trainer.fit, .validate or .test."""


# pytorch-lightning 2.6.6 does not do this. After a SIGTERM between two accumulated micro-batches
# its checkpoint lacks their gradients, a SIGTERM that only rank 1 gets leaves the job hanging, and
# the command exits with status 0.
class SaveOnSignal(pl.Callback):
    """On SIGTERM, SIGHUP or Ctrl-C (SIGINT), finishes the optimizer step, saves
    last.ckpt and ends the fit.

    last.ckpt is written by the Trainer's SaveLast, if it has one; no validation follows. A second
    Ctrl-C raises Interrupted at once. In a validation or test the current batch is finished,
    last.ckpt is saved if the Trainer is fitting, and StoppedInValidation is raised, because half a
    validation has no result.

    With several ranks a signal may reach only some of them, at different steps. About once a second
    all ranks compare what they received, in an all-reduce of two numbers on the CPU, and all stop
    after the same step.

    During training this callback's handlers replace Lightning's SIGTERM handler, which stops
    between micro-batches and saves nothing; afterwards the earlier handlers are restored. Outside
    the main thread, where Python allows no handlers, the callback does nothing.

    Args:
        until: a time limit, as a value of time.monotonic(), at which the fit ends as after a
            signal; None: no limit.
    """

    def __init__(self, *, until: float | None = None) -> None:
        super().__init__()
        self.until = until
        self.out_of_time = False  # whether the time limit ended the fit
        self._late: tuple[int, int] | None = None
        self.stopped_by: signal.Signals | None = None  # the signal that ended the fit
        # The optimizer step at which the fit ended, if it was stopped.
        self.stopped_at: int | None = None
        self._received: signal.Signals | None = None
        self._interrupts = 0
        self._previous: dict[int, Any] = {}
        self._steps = OptimizerStepCounter()
        self._group: Any = None
        self._speaks = False
        self._savers: list[SaveLast] = []  # of the Trainer
        self._steps_to_agreement = 1
        self._agreed_at = 0.0
        self._unshared = 0  # steps or batches of this rank since the last exchange
        # Of the current validation or test: the number that every rank has.
        self._shared_batches = 0
        self._validation_limit: Any = None

    @property
    def exit_code(self) -> int:
        """The exit status for a command: 128 + the signal's number (143, 130),
        0 without a signal."""
        return 0 if self.stopped_by is None else 128 + int(self.stopped_by)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
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
        listens = self._previous or self._group is not None
        if (
            trainer.sanity_checking
            or not listens
            or dataloader_idx
            or batch_idx >= self._shared_batches
        ):
            return
        reported = self._agree()
        if reported is None:
            return
        self._note(reported, trainer.global_step)
        if trainer.state.fn == "fit":
            self._save(trainer)
        raise StoppedInValidation(f"stopped in a validation after step {trainer.global_step}")

    on_test_batch_end = on_validation_batch_end

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if not self._steps.ended(trainer):
            return
        reported = self._agree()
        if reported is None:
            return
        if trainer.global_step == trainer.max_steps:  # the fit is over anyway
            self._late = (reported, trainer.global_step)
            return
        self._note(reported, trainer.global_step)
        self._save(trainer)
        # Lightning would validate once more before it stops; the sender of a signal does not
        # want to wait for that.
        self._validation_limit = trainer.limit_val_batches
        trainer.limit_val_batches = 0
        trainer.fit_loop.min_epochs = 0
        trainer.fit_loop.epoch_loop.min_steps = None
        trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore(trainer)  # before Lightning, whose handlers replaced others, restores those

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._restore(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._restore(trainer)
        # A signal to all processes of the command also ends those that compile for this one.
        number = self._received if trainer.world_size == 1 else None
        if isinstance(exception, KeyboardInterrupt):
            number = exception.number if isinstance(exception, Interrupted) else signal.SIGINT
        if number is not None and self.stopped_by is None:
            self.stopped_by, self.stopped_at = number, trainer.global_step

    def take_late(self, trainer: pl.Trainer) -> None:
        """Record a signal that came at the fit's last step, or in the validation after it, as
        having stopped the fit.

        For programs that continue after the fit. Every rank must call `take_late`.
        """
        if self._late is None:
            self._steps_to_agreement = 1
            reported = self._agree()
            self._late = None if reported is None else (reported, trainer.global_step)
        if self._late is not None:
            self._note(*self._late)

    def _begin(self, trainer: pl.Trainer) -> None:
        """Install the signal handlers, and the process group in which ranks compare what they
        received."""
        self._speaks = trainer.is_global_zero
        self._savers = [one for one in trainer.checkpoint_callbacks if isinstance(one, SaveLast)]
        self._steps_to_agreement, self._agreed_at, self._unshared = 1, time.monotonic(), 0
        if trainer.world_size > 1 and dist.is_initialized() and self._group is None:
            # A separate group on the CPU: the exchange must not wait for work queued on a GPU.
            self._group = (
                dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
            )
        if self._group is not None and trainer.state.fn == "fit":
            # No broadcast of Lightning's SIGTERM flag before every batch: Lightning 2.6 reads its
            # result back from the device, so that the host can never run ahead of the GPU. Our
            # handlers never set the flag. Versions without this method need nothing.
            loop = trainer.fit_loop.epoch_loop
            if hasattr(loop, "_broadcast_sigterm_tensor"):
                loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        if threading.current_thread() is not threading.main_thread():
            return
        self._previous = handle(self._on_signal)

    def _begin_evaluation(self, trainer: pl.Trainer, batches: Any) -> None:
        if trainer.state.fn != "fit" and not self._previous:
            self._begin(trainer)
        count = sum(int(number) for number in batches if number != float("inf"))
        if self._group is not None:  # a rank with one more batch would wait for the others for ever
            least = torch.tensor(count, dtype=torch.int64)
            dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
            count = int(least)
        self._shared_batches = count

    def _note(self, reported: int, step: int) -> None:
        self.stopped_at = step
        if reported == TIME_IS_UP:
            self.out_of_time = True
        else:
            self.stopped_by = signal.Signals(reported)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A sweep passes a SIGTERM on in addition to the terminal's Ctrl-C.
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            saved = any(checkpoint_exists(Path(str(one.dirpath)) / LAST) for one in self._savers)
            left = "the last checkpoint is an earlier one" if saved else "no checkpoint was saved"
            raise Interrupted(number, f"stopped at once by a second Ctrl-C; {left}")
        leave_closed_terminal()
        if self._received is None and self._speaks:
            name = signal.Signals(number).name
            line = (
                "\n"
                f"{name} received: finishing this step and saving a checkpoint (Ctrl-C "
                "again: quit at once).\n"
            )
            with contextlib.suppress(OSError):  # a pipe that nobody reads
                os.write(2, line.encode())  # not print: the interrupted code may be printing
        self._received = signal.Signals(number)

    def _report(self) -> int:
        """Return the number of the signal that this rank received, TIME_IS_UP if the time limit is
        over, or 0."""
        if self._received is not None:
            return int(self._received)
        return TIME_IS_UP if self.until is not None and time.monotonic() >= self.until else 0

    def _agree(self) -> int | None:
        """Return the largest `_report` of any rank, the same on every rank; None if all are 0, or
        if the ranks do not compare at this step."""
        if self._group is None:
            return self._report() or None
        self._steps_to_agreement -= 1
        self._unshared += 1
        if self._steps_to_agreement > 0:
            return None
        now = time.monotonic()
        seconds_per_step = (now - self._agreed_at) / self._unshared
        wanted = min(MAX_STEPS_APART, max(1, int(AGREE_SECONDS / max(seconds_per_step, 1e-6))))
        # Every rank proposes when to compare next. The largest proposal holds for all: they
        # compare at the same step.
        both = torch.tensor([self._report(), wanted], dtype=torch.int64)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        number, self._steps_to_agreement = both.tolist()
        self._agreed_at, self._unshared = now, 0
        return number or None

    def _save(self, trainer: pl.Trainer) -> None:
        for saver in self._savers:
            saver.save(trainer)

    def _restore(self, trainer: pl.Trainer) -> None:
        restore(self._previous)
        self._previous = {}
        if self._validation_limit is not None:
            trainer.limit_val_batches = self._validation_limit
            self._validation_limit = None


class EndsOnSigterm(pl.Callback):
    """Restores the SIGTERM handler of before the Trainer in evaluations: pytorch-lightning 2.6.6
    installs one that acts in training alone."""

    def __init__(self) -> None:
        self.handler = signal.getsignal(signal.SIGTERM)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Python sets no handlers in others.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.handler)

    on_test_start = on_validation_start
