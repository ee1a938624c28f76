"""One fit as the tasks of encoders have it: callbacks, checkpoints, signals, out of memory, the last validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from flashtrain.batching import Batching
from flashtrain.components import make_callbacks
from flashtrain.encoder_batching import memory_advice
from flashtrain.run import deadline, make_trainer, stopped
from flashtrain.run_folder import CHECKPOINTS, LAST
from flashtrain.settings import Settings
from flashtrain.training.checkpoints import checkpoint_callbacks, keep_if_best
from flashtrain.training.finite import StopOnNonFinite
from flashtrain.training.hardware import Hardware
from flashtrain.training.loggers import close_loggers, log_summary
from flashtrain.training.out_of_memory import OutOfMemory, is_out_of_memory, out_of_memory_line
from flashtrain.training.progress import make_progress
from flashtrain.training.signals import SaveOnSignal
from flashtrain.training.throughput import Throughput


def fit(
    settings: Settings,
    hardware: Hardware,
    folder: Path,
    task: pl.LightningModule,
    data: pl.LightningDataModule,
    throughput: Throughput,
    *,
    resumed: Path | None,
    started: float,
    finish: Callable[[pl.Trainer], dict[str, Any]],
    batching: Batching,
    advice: str,
    logs: Path | None = None,
    goes_on: bool = False,
    settle: Callable[[], None] | None = None,
    monitor: str = "validation_loss",
    mode: str = "min",
    callbacks: Sequence[pl.Callback] = (),
    validated: Callable[[int], bool] | None = None,
) -> dict[str, Any]:
    """Train to the end, validate once more where the last step was no time for it, and return finish(trainer).

    resumed: the checkpoint to go on from. started: time.time() at the command's start. batching: the micro-batches, and
    what they are estimated to need; advice: what else needs less memory. logs: where loggers write (None: folder).
    goes_on: another training starts from where this one ends, so its end is a checkpoint too, and a signal that comes
    while it is written still stops the run; settle: called before. monitor, mode: see checkpoint_callbacks. validated:
    whether there was a validation after so many steps (None: where they are a multiple of trainer.validate_every).
    Raises Stopped after a signal or at the end of trainer.max_minutes, OutOfMemory.
    """
    signals = SaveOnSignal(until=deadline(settings, started))
    own = [
        throughput,
        StopOnNonFinite(),
        signals,
        *callbacks,
        *checkpoint_callbacks(
            folder / CHECKPOINTS, every_n_steps=settings.trainer.checkpoint_every, monitor=monitor, mode=mode
        ),
        pl.callbacks.LearningRateMonitor(logging_interval="step"),
        make_progress(settings.trainer.log_every),
        *make_callbacks(settings),
    ]
    trainer = make_trainer(settings, hardware, logs or folder, own, accumulate=batching.accumulate)
    try:
        try:
            trainer.fit(task, data, ckpt_path=str(resumed) if resumed else None, weights_only=True)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            saved = folder if (folder / CHECKPOINTS / LAST).exists() else None
            raise OutOfMemory(
                out_of_memory_line(
                    error,
                    batching.estimate,
                    free_bytes=hardware.free_memory_bytes,
                    saved=saved,
                    advice=memory_advice(batching, advice),
                )
            ) from error
        if signals.stopped_by is not None or signals.out_of_time:
            raise stopped(signals, folder)
        step = trainer.global_step
        if not (step % settings.trainer.validate_every == 0 if validated is None else validated(step)):
            trainer.validate(task, data, verbose=False)
            keep_if_best(trainer)
        if goes_on:
            if settle is not None:
                settle()
            trainer.save_checkpoint(folder / CHECKPOINTS / LAST)
            signals.take_late(trainer)
            if signals.stopped_by is not None or signals.out_of_time:
                raise stopped(signals, folder)
        row = finish(trainer)
        if trainer.is_global_zero:
            log_summary(trainer.loggers, row)
    finally:
        close_loggers(trainer.loggers)
    return row


def metric(trainer: pl.Trainer, name: str) -> float | None:
    """What was logged under this name last; None where nothing was."""
    value = trainer.callback_metrics.get(name)
    return None if value is None else float(value)
