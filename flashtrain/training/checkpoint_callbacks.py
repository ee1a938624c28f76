"""Callbacks that write a run's checkpoints: last.ckpt every N steps and at the end, earlier ones of
which stay if wanted; best.ckpt after validations."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.trainer.call import _call_callbacks_on_save_checkpoint

from flashtrain.announce import say
from flashtrain.errors import first_line
from flashtrain.training.checkpoints import (
    BEST,
    LAST,
    PARTIAL,
    checkpoint_exists,
    link,
    read_checkpoint,
    rebuild_paths,
)
from flashtrain.training.metrics_file import MetricsFile
from flashtrain.training.steps import OptimizerStepCounter


def checkpoint_callbacks(
    folder: str | Path,
    every_n_steps: int | None = None,
    monitor: str | None = "validation_loss",
    mode: str = "min",
    **kept: Any,
) -> list[pl.Callback]:
    """Make the checkpoint callbacks of a run: SaveLast, and BestCheckpoint if `monitor` is set.

    Args:
        folder: where the checkpoints are written.
        every_n_steps: optimizer steps between two writes of last.ckpt; None: at the end only.
        monitor: the logged metric that best.ckpt follows; None: no best.ckpt.
        mode: "min" or "max": whether the lowest or the highest value is best.
        kept: keep and stage of SaveLast.
    """
    last = SaveLast(folder, every_n_steps, **kept)
    return [last] if monitor is None else [BestCheckpoint(folder, monitor, mode), last]


def keep_if_best(trainer: pl.Trainer) -> None:
    """Write best.ckpt if a validation after the fit shows that the weights are the best so far.

    Every rank must call this, with the same validation result.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, BestCheckpoint) and callback.monitor in trainer.callback_metrics:
            callback._save_monitor_checkpoint(trainer, callback._monitor_candidates(trainer))


class BestCheckpoint(ModelCheckpoint):
    """Writes best.ckpt, the weights with the best validation so far, without
    the optimizer's states.

    Unlike ModelCheckpoint with save_weights_only, it also saves the score to beat, and
    calls the hooks of callbacks (StopOnNonFinite checks the weights). A resumed run reads
    the score to beat from best.ckpt, since last.ckpt can be older: it is written before the
    validation that follows the fit. A best.ckpt of later steps, which are made anew, is replaced
    by the next validation.
    """

    _resumed: tuple[int, int] = (0, 0)  # place_of the checkpoint from which the run resumes

    def __init__(
        self, folder: str | Path, monitor: str = "validation_loss", mode: str = "min"
    ) -> None:
        super().__init__(
            dirpath=folder,
            filename=Path(BEST).stem,
            monitor=monitor,
            mode=mode,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._resumed = place_of(checkpoint)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        best = Path(self.dirpath or "") / BEST
        try:
            if state_dict["best_model_score"] is None or not checkpoint_exists(best):
                return
            saved = read_checkpoint(best, mmap=True)  # reads none of its weights
            if place_of(saved) > self._resumed:
                return
            rebuild_paths(saved, best.parent)
            super().load_state_dict(saved["callbacks"][self.state_key])
        except Exception as error:  # noqa: BLE001 - last.ckpt is whole, whatever became of this file
            reason = first_line(error)
            say(
                f"{best} cannot be read, and the next validation replaces it: {reason}",
                level=logging.WARNING,
            )

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=True)
        checkpoint["callbacks"] = {self.state_key: self.state_dict()}
        _call_callbacks_on_save_checkpoint(trainer, checkpoint)
        trainer.strategy.save_checkpoint(checkpoint, filepath)
        trainer.strategy.barrier("BestCheckpoint")
        self._last_global_step_saved = trainer.global_step


class SaveLast(ModelCheckpoint):
    """Writes `last.ckpt` every N optimizer steps, after the last step, and when an
    exception ends the fit.

    It differs from Lightning's ModelCheckpoint (2.6.6), which also writes between two micro-batches
    of a step, so that the gradients of the first are lost: in a resumed run, and after an
    exception. ModelCheckpoint writes the last step only if N divides it, or else after the loop has
    closed its epoch; a longer run would not resume from there at the next sample. Lightning also
    counts an interrupted validation as half done; a checkpoint written during a validation
    (best.ckpt, or last.ckpt after a signal) therefore records the state before the validation.

    After an exception last.ckpt holds the last completed step. It is not written if the optimizer
    was updating weights, if several processes train (the others may wait for the failed one), or
    after KeyboardInterrupt.

    The newest `keep` of the checkpoints of every N steps stay as step-N.ckpt when last.ckpt is
    written again; their names begin with `stage`, where stages count their own steps.
    """

    def __init__(
        self, folder: str | Path, every_n_steps: int | None = None, keep: int = 0, stage: str = ""
    ) -> None:
        super().__init__(
            dirpath=folder,
            filename=Path(LAST).stem,
            every_n_train_steps=every_n_steps,
            every_n_epochs=0,
            enable_version_counter=False,
        )
        self.keep, self.stage = keep, stage
        self._steps = OptimizerStepCounter()
        # The last step that was completed, and the fit loop's state there.
        self._ended: tuple[int, Any] = (-1, None)
        self._updated = -1  # the step after which the optimizer began to change the weights

    def state_dict(self) -> dict[str, Any]:
        return {}  # its path follows from this run's folder

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._steps.start(trainer)
        self._last_global_step_saved = trainer.global_step  # nothing new to save yet
        self._ended, self._updated = _end_of_step(trainer), -1
        _continue_metrics(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # For a run that died in its last validation and has no step left.
        _continue_metrics(trainer)

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self._updated = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not self._steps.ended(trainer):
            return
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.global_step == trainer.max_steps:
            self.save(trainer)
        every = trainer.val_check_batch
        validates = trainer.is_last_batch or (
            isinstance(every, int) and (batch_idx + 1) % every == 0
        )
        if validates or trainer.world_size == 1:  # the state of the data may need a collective
            self._ended = _end_of_step(trainer)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        step, loop = self._ended
        cut_off = trainer.validating or trainer.interrupted
        if trainer.state.fn == "fit" and cut_off and step == trainer.global_step:
            checkpoint["loops"]["fit_loop"] = loop

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.save(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        step = trainer.global_step
        whole = (
            isinstance(exception, Exception) and trainer.world_size == 1 and self._updated != step
        )
        begun = trainer.state.fn == "fit" and self._ended[0] >= 0
        if not whole or not begun or self._last_global_step_saved == step:
            return
        pl_module.zero_grad(set_to_none=True)  # memory may have run out
        try:
            self.save(trainer)
            say(
                f"the checkpoint of step {step} was saved. "
                f"Continue from it with resume={self.best_model_path}"
            )
        except Exception as problem:  # noqa: BLE001 - the error that ended the fit is raised
            if str(problem) != str(exception):
                say(f"no checkpoint of step {step} was saved: {first_line(problem)}")

    def save(self, trainer: pl.Trainer) -> None:
        """Write last.ckpt now, unless it holds this optimizer step already.
        Every rank must call this."""
        if not trainer.fast_dev_run and self._last_global_step_saved != trainer.global_step:  # type: ignore[attr-defined]
            self._save_topk_checkpoint(trainer, {})

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        # A run that resumes from this checkpoint does not log its steps again.
        _flush_metrics(trainer, in_step=self._ended[0] == trainer.global_step)
        if self.keep:
            self._keep_earlier(trainer, Path(filepath))
        super()._save_checkpoint(trainer, filepath)

    def _keep_earlier(self, trainer: pl.Trainer, last: Path) -> None:
        """Before last.ckpt is written again, keep it as step-N.ckpt if it is a periodic one."""
        step, every = self._last_global_step_saved, self._every_n_train_steps
        numbers = (step, step - self.keep * every)
        now, old = (last.with_name(f"{self.stage}step-{one}.ckpt") for one in numbers)
        partial, remove = now.with_name(now.name + PARTIAL), trainer.strategy.remove_checkpoint
        remove(partial)  # and, on every rank, wait for last.ckpt's shards
        if not trainer.is_global_zero or not step or step % every or not checkpoint_exists(last):
            return
        # After a resume from another checkpoint last.ckpt may be of another step.
        if read_checkpoint(last, mmap=True)["global_step"] == step:
            link(last, partial)
            remove(now)
            remove(old)
            partial.rename(now)


def place_of(checkpoint: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of a checkpoint's stage, from 0, and its optimizer step in it."""
    return checkpoint.get("flashtrain", {}).get("stage", 0), checkpoint["global_step"]


def _end_of_step(trainer: pl.Trainer) -> tuple[int, dict[str, Any]]:
    return trainer.global_step, copy.deepcopy(trainer.fit_loop.state_dict())


def _continue_metrics(trainer: pl.Trainer) -> None:
    for logger in trainer.loggers:
        if isinstance(logger, MetricsFile):
            logger.continue_from(trainer.global_step, trainer.log_every_n_steps)  # type: ignore[attr-defined]


def _flush_metrics(trainer: pl.Trainer, *, in_step: bool) -> None:
    """Write the metrics of the step that has ended to metrics.jsonl; `in_step`: the next step has
    begun and may have logged metrics already."""
    # Lightning gives a step's metrics to the loggers only after the hook that writes its
    # checkpoint. MetricsFile ignores the repetition.
    connector = trainer._logger_connector
    step = trainer.fit_loop.epoch_loop._batches_that_stepped
    for logger in trainer.loggers:
        if not isinstance(logger, MetricsFile):
            continue
        if (
            not in_step
            and trainer.training
            and connector.should_update_logs
            and trainer._results is not None
        ):
            values = {name: float(value) for name, value in connector.metrics["log"].items()}
            if values:
                logger.log_metrics({**values, "epoch": trainer.current_epoch}, step=step)
        logger.flush()
