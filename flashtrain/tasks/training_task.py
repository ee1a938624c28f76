"""The LightningModule that every task derives from."""

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
from flashtrain.training.signals import EndsOnSigterm

DEFAULT_LEARNING_RATE = 6e-4

OptimizerBuilder = Callable[[nn.Module], torch.optim.Optimizer]
ScheduleBuilder = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


T = TypeVar("T")


def replayed(compute: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call a function compiled with mode="reduce-overhead", which replays recorded CUDA launches,
    and return a copy of its result, which the next call would overwrite."""
    # A replay writes its results where the last one did: what outlives the step is copied.
    torch.compiler.cudagraph_mark_step_begin()
    return tree_map(torch.clone, compute(*arguments, **named))


class TrainingTask(pl.LightningModule):
    """A LightningModule around a model; subclasses add the loss.

    Logs `gradient_norm` (before clipping).

    Args:
        make_optimizer: returns the model's optimizer; None: AdamW at 6e-4.
        make_schedule: returns the optimizer's schedule, which is stepped at each
            optimizer step; None: constant.
        gradient_clip: bound of the global L2 norm of the gradients; 0 for none.
        description: plain values that rebuild the model, saved in every checkpoint.
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
        # Read by ContextParallelStrategy.
        self.shares_sequences = getattr(model, "shares_sequences", None)
        self.gradient_clip = gradient_clip
        self.description = dict(description or {})
        self._make_optimizer = make_optimizer or partial(adamw, lr=DEFAULT_LEARNING_RATE)
        self._make_schedule = make_schedule
        self._step_losses: list[Tensor] = []
        self._shares: list[Tensor] = []  # see record_loss
        # The factor of the step's gradients, where losses have shares.
        self._per_label: Tensor | None = None
        self._first_loss: Tensor | None = None
        self._last_loss: Tensor | None = None

    def configure_model(self) -> None:
        """Raise UserError under a strategy that shards weights; a subclass that supports such
        strategies overrides this method."""
        if self.device_mesh is not None:
            raise UserError(
                f"{type(self).__name__} trains whole models on each device. "
                "Use trainer.strategy=ddp."
            )

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and the schedule if there is one, in Lightning's form."""
        optimizer = self._make_optimizer(self.model)
        if self._make_schedule is None:
            return optimizer
        schedule = {"scheduler": self._make_schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Free the gradients of the step before, which Lightning would hold in memory during this
        step's forward."""
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.zero_grad(set_to_none=True)

    def configure_gradient_clipping(
        self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any
    ) -> None:
        """Clip the gradients to `gradient_clip`, in place of Lightning's own clipping, which
        refuses fused AdamW under mixed precision."""
        if self._per_label is not None:
            gradients = [
                parameter.grad
                for parameter in self.model.parameters()
                if parameter.grad is not None
            ]
            torch._foreach_mul_(gradients, self._per_label)
        norm = clip_gradients(
            self.model,
            self.gradient_clip,
            scale=gradient_scale(self.trainer, optimizer),
            optimizer=optimizer,
        )
        if self.is_logged_step():
            self.log("gradient_norm", norm)

    def record_loss(
        self, loss: Tensor, batch_idx: int, share: Tensor | None = None
    ) -> Tensor | None:
        """Record a micro-batch's loss; return the mean loss of the optimizer step if this is its
        last micro-batch, else None.

        Args:
            loss: The micro-batch's mean loss, times `share` if that is given.
            batch_idx: The micro-batch's number.
            share: The share of the micro-batch's positions that are labels, if it differs between
                micro-batches of equal size: loss and gradients of the step are then the mean over
                all labels of the step. Needs automatic optimization.
        """
        self._step_losses.append(loss.detach())
        if share is not None:
            self._shares.append(share)
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches:
            return None
        step_loss = torch.stack(self._step_losses).mean()
        self._step_losses.clear()
        if self._shares:
            self._per_label = 1 / self._over_ranks(torch.stack(self._shares).mean()).clamp(
                min=1e-12
            )
            self._shares.clear()
            step_loss = step_loss * self._per_label
        if self._first_loss is None:
            self._first_loss = self._over_ranks(step_loss)
        self._last_loss = step_loss
        return step_loss

    def on_train_end(self) -> None:
        """Average the last step's loss over all ranks, and log it if that step was not logged, so
        that the loss curve ends at the loss of the summary row."""
        if self._last_loss is None:
            return
        self._last_loss = self._over_ranks(self._last_loss)
        done, every = self.global_step, self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if done == self.trainer.max_steps and done % max(1, every):
            for logger in self.trainer.loggers:
                logger.log_metrics({"train_loss": float(self._last_loss)}, step=done - 1)

    def _over_ranks(self, losses: Tensor) -> Tensor:
        """Return the mean of `losses` over all ranks; every rank must call this."""
        if self.trainer.world_size == 1:
            return losses
        return self.trainer.strategy.reduce(losses, reduce_op="mean")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the model's description, from which it can be rebuilt, and the run's first and last
        loss. Every rank calls this."""
        checkpoint["flashtrain"] = self.description
        checkpoint["first_loss"] = self.first_loss
        checkpoint["last_loss"] = (
            None if self._last_loss is None else float(self._over_ranks(self._last_loss))
        )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the losses of the run that this one continues."""
        losses = checkpoint.get("first_loss"), checkpoint.get("last_loss")
        self._first_loss, self._last_loss = (
            None if loss is None else torch.tensor(loss, device=self.device) for loss in losses
        )

    @property
    def first_loss(self) -> float | None:
        """The loss of the run's first step, before any update, as a mean over ranks;
        None before that step."""
        return None if self._first_loss is None else float(self._first_loss)

    @property
    def last_loss(self) -> float | None:
        """The loss of the latest step, on this rank; a mean over ranks once the fit has ended. None
        before the first step."""
        return None if self._last_loss is None else float(self._last_loss)

    def is_logged_step(self) -> bool:
        """Return whether this step's metrics are logged: the first step's, and
        those at the log interval."""
        # Averaging over ranks and self.log cost time at each step.
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return self.global_step == 0 or (self.global_step + 1) % max(1, every) == 0


def evaluating_trainer(hardware: Hardware) -> pl.Trainer:
    """Return a Lightning Trainer for one evaluation on one device; it writes no files."""
    return pl.Trainer(
        accelerator="gpu" if hardware.kind == "cuda" else "cpu",
        devices=1,
        precision=hardware.precision,  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[LineProgress(), EndsOnSigterm()],
    )


def metric(trainer: pl.Trainer, name: str) -> float | None:
    """Return the last logged value of a metric; None if it was never logged."""
    value = trainer.callback_metrics.get(name)
    return None if value is None else float(value)
