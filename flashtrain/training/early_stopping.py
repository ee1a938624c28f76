"""Callbacks that end a fit early: at a loss that is not finite, at a target accuracy, or once
validations no longer improve."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import EarlyStopping

from flashtrain.announce import say
from flashtrain.errors import UserError, unknown
from flashtrain.training.steps import OptimizerStepCounter, log_interval

NEVER = torch.iinfo(torch.int64).max


# Lightning 2.6.6's EarlyStopping(check_finite=True) looks at one logged figure, and lets
# checkpoints be written over.
class StopOnNonFinite(pl.Callback):
    """Ends the fit with a UserError that names the first optimizer step whose
    loss was NaN or infinite.

    Losses stay on the device, because reading a loss makes the host wait. They are checked together
    at the trainer's log interval (where the loggers read values anyway), before every checkpoint
    and at the end. Before a checkpoint the weights are checked too, so that a bad state never
    replaces a good checkpoint. All ranks check the same steps and agree on the first bad step, so
    that they stop together.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps = OptimizerStepCounter()
        # (optimizer step, loss), not checked yet.
        self._pending: list[tuple[int, torch.Tensor]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps.start(trainer)
        self._pending.clear()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any, **__: Any
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
        pending = self._pending
        losses = (
            torch.stack([loss.reshape(()).float() for _, loss in pending]).tolist()
            if pending
            else []
        )
        # Step and kind in one number, so that one reduction gives every rank both.
        bad = [
            2 * step + (0 if math.isnan(loss) else 1)
            for (step, _), loss in zip(pending, losses, strict=True)
            if not math.isfinite(loss)
        ]
        first = _first_over_ranks(trainer, min(bad, default=NEVER))
        if first != NEVER:
            step, infinite = divmod(first, 2)
            raise UserError(
                f"loss became {'infinite' if infinite else 'nan'} at step {step}; "
                f"{_advice(trainer)}"
            )
        self._pending = []  # not earlier: after this error no checkpoint may be written either

    def _check_weights(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        floats: list[Any] = [p.detach() for p in pl_module.parameters() if p.is_floating_point()]
        # Of sharded ones this rank's.
        parts = [p.to_local() if hasattr(p, "to_local") else p for p in floats]
        finite = [torch.isfinite(part).all() for part in parts]
        bad = bool(finite) and not bool(torch.stack(finite).all())
        if _first_over_ranks(trainer, trainer.global_step if bad else NEVER) != NEVER:
            raise UserError(
                f"weights were no longer finite after step {trainer.global_step} although the loss "
                f"was finite; no checkpoint was overwritten; {_advice(trainer)}"
            )


def _first_over_ranks(trainer: pl.Trainer, found: int) -> int:
    """Return the smallest of the numbers `found` on all ranks."""
    if trainer.world_size == 1 or not dist.is_initialized():
        return found
    first = torch.tensor(found, dtype=torch.int64, device=trainer.strategy.root_device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    return int(first)


def _advice(trainer: pl.Trainer) -> str:
    named = [getattr(callback, "best_model_path", "") for callback in trainer.checkpoint_callbacks]
    paths = [Path(path) for path in named if path and Path(path).exists()]
    good = max(paths, key=lambda path: path.stat().st_mtime, default=None)
    where = f"last good checkpoint: {good}" if good else "no checkpoint was saved yet"
    return f"{where}; try a lower learning rate, a longer warm-up or gradient clipping"


class StopAtTarget(pl.Callback):
    """Ends training at the first validation whose `validation_accuracy` is at least `target`.

    The attribute `seconds` is the training time up to the end of that validation, earlier parts of
    a resumed run included; it is None until the target is reached.
    """

    def __init__(self, target: float) -> None:
        self.target = target
        self.seconds: float | None = None
        self._before = 0.0
        self._begun: float | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begun = time.monotonic()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        value = trainer.callback_metrics.get("validation_accuracy")
        if (
            trainer.sanity_checking
            or self._begun is None
            or value is None
            or self.seconds is not None
        ):
            return
        if float(value) >= self.target:
            self.seconds = self._elapsed()
            say(
                f"validation_accuracy {float(value):.4f} reached its target {self.target:g} "
                f"after {trainer.global_step} steps and {self.seconds:.1f} s"
            )
            trainer.should_stop = True

    def _elapsed(self) -> float:
        return self._before + (0.0 if self._begun is None else time.monotonic() - self._begun)

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self._elapsed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = float(state_dict["seconds"])


class StopWithoutGain(EarlyStopping):
    """Ends training after `patience` validations in a row whose figure `monitor` is not better.

    Unlike with Lightning's own (2.6.6), a resumed run has its own patience, not its checkpoint's,
    and one that had ended so trains no further.
    """

    def __init__(self, monitor: str, mode: str, patience: int) -> None:
        # StopOnNonFinite is there for losses that are not finite. Lightning would wait for the
        # epoch's end where every micro-batch is validated: it takes an interval of 1 for an epoch.
        super().__init__(
            monitor,
            mode=mode,
            patience=patience,
            check_finite=False,
            check_on_train_epoch_end=False,
        )

    @property
    def reason(self) -> str | None:
        """Why the training has ended; None if this callback has not ended it."""
        best, count = f"{float(self.best_score):.4g}", self.wait_count
        text = f"{self.monitor} was not better than {best} in {count} validations"
        return text if count >= self.patience else None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not sum(trainer.num_val_batches):
            raise UserError("trainer.early_stopping_patience needs held-out data, and has none.")
        trainer.should_stop = trainer.should_stop or self.reason is not None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.monitor not in (logged := trainer.callback_metrics):
            raise unknown("trainer.early_stopping_monitor", self.monitor, logged)
        super().on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.reason is not None:
            say(f"training ends at step {trainer.global_step}: {self.reason}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})
