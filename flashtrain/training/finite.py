"""Stopping a run whose loss or weights are no longer finite: the step is named, and no good checkpoint is lost."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import Checkpoint, ModelCheckpoint

from flashtrain.errors import UserError
from flashtrain.training.steps import OptimizerStepCounter, log_interval

NEVER = torch.iinfo(torch.int64).max


class StopOnNonFinite(pl.Callback):
    """Ends the fit with a UserError that names the first optimiser step whose loss was NaN or infinite.

    Reading a loss makes the host wait for the device, so the losses stay on the device and are looked at together: at
    the trainer's log interval (where the loggers read values anyway), before every checkpoint and at the end. Before a
    checkpoint the weights are looked at too, so that no spoiled state ever replaces a good checkpoint. All ranks look
    at the same steps and agree on the first bad one, so that they stop together.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps = OptimizerStepCounter()
        self._pending: list[tuple[int, torch.Tensor]] = []  # (optimiser step, loss), not looked at yet

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps.start(trainer)
        self._pending.clear()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        ended = self._steps.ended(trainer)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):
            step = trainer.global_step if ended else trainer.global_step + 1
            self._pending.append((step, loss.detach()))
        interval = log_interval(trainer)
        if ended and trainer.global_step % interval == 0:
            self._check_losses(trainer)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._check_losses(trainer)
        self._check_weights(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._check_losses(trainer)

    def _check_losses(self, trainer: pl.Trainer) -> None:
        pending, self._pending = self._pending, []
        losses = torch.stack([loss.reshape(()).float() for _, loss in pending]).tolist() if pending else []
        # Step and kind in one number, so that one reduction tells every rank both.
        bad = [
            2 * step + (0 if math.isnan(loss) else 1)
            for (step, _), loss in zip(pending, losses, strict=True)
            if not math.isfinite(loss)
        ]
        first = _first_over_ranks(trainer, min(bad, default=NEVER))
        if first != NEVER:
            step, infinite = divmod(first, 2)
            raise UserError(f"loss became {'infinite' if infinite else 'nan'} at step {step}; {_advice(trainer)}")

    def _check_weights(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        finite = [torch.isfinite(_local(p.detach())).all() for p in pl_module.parameters() if p.is_floating_point()]
        bad = bool(finite) and not bool(torch.stack(finite).all())
        if _first_over_ranks(trainer, trainer.global_step if bad else NEVER) != NEVER:
            raise UserError(
                f"weights were no longer finite after step {trainer.global_step} although the loss was;"
                f" no checkpoint was written over the last good one; {_advice(trainer)}"
            )


def _first_over_ranks(trainer: pl.Trainer, found: int) -> int:
    """The smallest of what the ranks found."""
    if trainer.world_size == 1 or not dist.is_initialized():
        return found
    first = torch.tensor(found, dtype=torch.int64, device=trainer.strategy.root_device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    return int(first)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a distributed parameter, or the parameter itself."""
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()


def _advice(trainer: pl.Trainer) -> str:
    good = last_written_checkpoint(trainer)
    where = f"last good checkpoint: {good}" if good else "no checkpoint had been written yet"
    return f"{where}; a lower learning rate, a longer warm-up or gradient clipping may help"


def last_written_checkpoint(trainer: pl.Trainer) -> str | None:
    """Path of the newest checkpoint that this fit's checkpoint callbacks have written, None where there is none."""
    paths: list[Path] = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, Checkpoint):
            continue
        named = [getattr(callback, "last_saved", None)]
        if isinstance(callback, ModelCheckpoint):
            named += [callback.last_model_path, callback.best_model_path]
        paths += [Path(path) for path in named if path and Path(path).exists()]
    return str(max(paths, key=lambda path: path.stat().st_mtime)) if paths else None
