"""What every training task shares: its optimiser and schedule, clipping, its losses' record, its checkpoints' notes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from flashtrain.errors import UserError
from flashtrain.training.gradient_clipping import clip_gradients, gradient_scale
from flashtrain.training.hardware import Hardware
from flashtrain.training.optimizers import adamw
from flashtrain.training.progress import LineProgress

DEFAULT_LEARNING_RATE = 6e-4

OptimizerBuilder = Callable[[nn.Module], torch.optim.Optimizer]
ScheduleBuilder = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


T = TypeVar("T")


def replayed(compute: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """What a compiled function gives whose launches are recorded and replayed (mode="reduce-overhead"), for a new step.

    A replay writes its results where the last one did: what outlives the step is copied.
    """
    torch.compiler.cudagraph_mark_step_begin()
    return tree_map(torch.clone, compute(*arguments, **named))


class TrainingTask(pl.LightningModule):
    """A LightningModule around one model; its tasks add the loss.

    make_optimizer, make_schedule: called with the model, then with the optimiser; the schedule is stepped each
        optimiser step. Defaults: AdamW at 6e-4, constant.
    gradient_clip: bound of the global L2 norm of the gradients, 0 for none.
    description: plain values saved in every checkpoint, that rebuild the model.

    Logs `gradient_norm` (before clipping).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        make_optimizer: OptimizerBuilder | None = None,
        make_schedule: ScheduleBuilder | None = None,
        gradient_clip: float = 1.0,
        description: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.gradient_clip = gradient_clip
        self.description = dict(description or {})
        self._make_optimizer = make_optimizer or partial(adamw, lr=DEFAULT_LEARNING_RATE)
        self._make_schedule = make_schedule
        self._step_losses: list[Tensor] = []
        self._first_loss: Tensor | None = None
        self._last_loss: Tensor | None = None

    def configure_model(self) -> None:
        """UserError: a strategy that shards models, which LanguageModel alone does; nothing would add up gradients."""
        if self.device_mesh is not None:
            raise UserError(f"{type(self).__name__} trains whole models on each device: choose trainer.strategy=ddp.")

    def configure_optimizers(self) -> Any:
        """The optimiser, and the schedule stepped at each optimiser step."""
        optimizer = self._make_optimizer(self.model)
        if self._make_schedule is None:
            return optimizer
        schedule = {"scheduler": self._make_schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Free the last step's gradients: Lightning would keep them next to all that this step's forward keeps."""
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.zero_grad(set_to_none=True)

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """Clip here: Lightning's own clipping refuses fused AdamW under mixed precision."""
        norm = clip_gradients(self.model, self.gradient_clip, scale=gradient_scale(self.trainer, optimizer))
        if self.is_logged_step():
            self.log("gradient_norm", norm)

    def record_loss(self, loss: Tensor, batch_idx: int) -> Tensor | None:
        """Keep a micro-batch's loss. After the last one of an optimiser step: the step's mean loss, else None."""
        self._step_losses.append(loss.detach())
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches:
            return None
        step_loss = torch.stack(self._step_losses).mean()
        self._step_losses.clear()
        if self._first_loss is None:
            self._first_loss = self._over_ranks(step_loss)
        self._last_loss = step_loss
        return step_loss

    def on_train_end(self) -> None:
        """Make the last loss that of all ranks: each computed another part of the step."""
        if self._last_loss is not None:
            self._last_loss = self._over_ranks(self._last_loss)

    def _over_ranks(self, losses: Tensor) -> Tensor:
        """The mean over all ranks, of which every one must call this."""
        return losses if self.trainer.world_size == 1 else self.trainer.strategy.reduce(losses, reduce_op="mean")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what rebuilds the model next to its weights, and the first and the last loss for the run's summary.

        Every rank calls this: the last loss is saved as the mean over all.
        """
        checkpoint["flashtrain"] = self.description
        checkpoint["first_loss"] = self.first_loss
        checkpoint["last_loss"] = None if self._last_loss is None else float(self._over_ranks(self._last_loss))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the losses of the run that this one continues."""
        losses = checkpoint.get("first_loss"), checkpoint.get("last_loss")
        self._first_loss, self._last_loss = (
            None if loss is None else torch.tensor(loss, device=self.device) for loss in losses
        )

    @property
    def first_loss(self) -> float | None:
        """The loss of the run's first step, before any update, over all ranks; None before it."""
        return None if self._first_loss is None else float(self._first_loss)

    @property
    def last_loss(self) -> float | None:
        """The loss of the latest step; None before the first. Over all ranks, once the fit has ended."""
        return None if self._last_loss is None else float(self._last_loss)

    def is_logged_step(self) -> bool:
        """Whether this step's values are looked at: averaging over ranks and self.log cost time at each step.

        The loggers take every so many steps; the progress lines begin with the first.
        """
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return self.global_step == 0 or (self.global_step + 1) % max(1, every) == 0


def evaluating_trainer(hardware: Hardware) -> pl.Trainer:
    """Lightning's Trainer for one evaluation on one device, which writes nothing."""
    return pl.Trainer(
        accelerator="gpu" if hardware.kind == "cuda" else "cpu",
        devices=1,
        precision=hardware.precision,  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[LineProgress()],
    )


def metric(trainer: pl.Trainer, name: str) -> float | None:
    """What was logged under this name last; None where nothing was."""
    value = trainer.callback_metrics.get(name)
    return None if value is None else float(value)
