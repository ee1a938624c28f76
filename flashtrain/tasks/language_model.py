"""The language-modelling task: next-token prediction as a LightningModule around any decoder of flashtrain.models.

B batch, S sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from flashtrain.data.batch import Batch
from flashtrain.distributed.context.sequence import mean_over_context, whole
from flashtrain.distributed.sharding import shard
from flashtrain.models.gpt2 import GPT2
from flashtrain.models.trainable import Trainable
from flashtrain.training.gradients import clip_gradients, gradient_scale
from flashtrain.training.optimizers import adamw
from flashtrain_kernels import Mask, masks

LOSSES_KEPT = 64
DEFAULT_LEARNING_RATE = 6e-4

OptimizerBuilder = Callable[[nn.Module], torch.optim.Optimizer]
ScheduleBuilder = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class LanguageModel(pl.LightningModule):
    """Trains a decoder on batches of packed text (flashtrain.data.batch.Batch).

    model: has `.loss(tokens, labels, positions=, mask=)`, a float32 scalar; GPT2 and its modern variant do.
    make_optimizer, make_schedule: called with the model, then with the optimiser; the schedule is stepped each
        optimiser step. Defaults: AdamW at 6e-4, constant.
    document_mask: attention stays within each document of a packed row, and positions restart there.
    gradient_clip: bound of the global L2 norm of the gradients, 0 for none.
    compile: run the loss through torch.compile (one graph, static shapes).
    cuda_graphs: record the compiled loss's launches, forward and backward, once and replay them: for models so small
        that launching takes longer than computing. Without effect unless the loss is compiled as a whole.

    Logs `train_loss`, `gradient_norm` (before clipping) and `validation_loss`, in nats a token.
    """

    def __init__(
        self,
        model: Trainable,
        *,
        make_optimizer: OptimizerBuilder | None = None,
        make_schedule: ScheduleBuilder | None = None,
        document_mask: bool = False,
        gradient_clip: float = 1.0,
        compile: bool = False,
        cuda_graphs: bool = False,
        description: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.document_mask = document_mask
        self.gradient_clip = gradient_clip
        self.description = dict(description or {})
        self._make_optimizer = make_optimizer or partial(adamw, lr=DEFAULT_LEARNING_RATE)
        self._make_schedule = make_schedule
        self._compile = compile
        self._replays = compile and cuda_graphs
        self._loss: Callable[..., Tensor] = model.loss
        self._step_losses: list[Tensor] = []
        self._first_loss: Tensor | None = None
        self._last_losses: deque[Tensor] = deque(maxlen=LOSSES_KEPT)
        self._shard_mesh_seen = False

    def configure_model(self) -> None:
        """Shard the weights when the strategy brings a device mesh (FSDP2), then compile.

        What moves checkpoints to host memory runs between the blocks, outside of compiled code: then each block is
        compiled by itself, and not the loss as a whole.
        """
        if self.device_mesh is not None and not self._shard_mesh_seen:
            shard(self.model, self.device_mesh, precision=str(self.trainer.precision))
            self._shard_mesh_seen = True
            self._loss = self.model.loss  # the one that gathers the weights first
        if self._compile and isinstance(self.model, GPT2) and self.model.savings.offload:
            self.model.compile_blocks(dynamic=False, fullgraph=True)
            self._replays = False
        elif self._compile:
            # FSDP2's hooks break the graph between blocks, so one full graph is asked for only without it.
            self._loss = torch.compile(
                self.model.loss,
                dynamic=False,
                fullgraph=not self._shard_mesh_seen,
                mode="reduce-overhead" if self._replays else None,
            )

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, S, vocabulary rows) of tokens (B, S)."""
        return self.model(tokens)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The micro-batch's mean loss. What is logged is the mean over the optimiser step's micro-batches."""
        loss = self.batch_loss(batch)
        self._step_losses.append(loss.detach())
        accumulate = self.trainer.accumulate_grad_batches
        if (batch_idx + 1) % accumulate == 0:
            step_loss = torch.stack(self._step_losses).mean()
            self._step_losses.clear()
            if self._first_loss is None:
                self._first_loss = step_loss
            self._last_losses.append(step_loss)
            if self._is_logged_step():
                self.log("train_loss", step_loss, prog_bar=True, sync_dist=self.trainer.world_size > 1)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds the micro-batch to the held-out loss, a mean over all held-out samples and ranks."""
        loss = self.batch_loss(batch)
        self.log("validation_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(batch["tokens"]))

    def configure_optimizers(self) -> Any:
        """The optimiser, and the schedule stepped at each optimiser step."""
        optimizer = self._make_optimizer(self.model)
        if self._make_schedule is None:
            return optimizer
        schedule = {"scheduler": self._make_schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """Clip here: Lightning's own clipping refuses fused AdamW under mixed precision."""
        norm = clip_gradients(self.model, self.gradient_clip, scale=gradient_scale(self.trainer, optimizer))
        if self._is_logged_step():
            self.log("gradient_norm", norm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what rebuilds the model beside its weights, and the first loss for the run's summary."""
        checkpoint["flashtrain"] = self.description
        checkpoint["first_loss"] = self.first_loss

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the first loss of the run that this one continues."""
        first = checkpoint.get("first_loss")
        self._first_loss = None if first is None else torch.tensor(first)

    @property
    def first_loss(self) -> float | None:
        """The loss of the run's first step, before any update; None before it. Under DDP, this rank's."""
        return None if self._first_loss is None else float(self._first_loss)

    @property
    def last_loss(self) -> float | None:
        """The mean loss of the latest steps (64 at most); None before the first. Under DDP, this rank's."""
        if not self._last_losses:
            return None
        return torch.stack([loss.float().cpu() for loss in self._last_losses]).mean().item()

    def _is_logged_step(self) -> bool:
        """Whether the loggers take this step's values: averaging over ranks and self.log cost time at each step."""
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return (self.global_step + 1) % max(1, every) == 0

    def batch_loss(self, batch: Batch) -> Tensor:
        """The mean loss of a micro-batch in nats, with the gradient's graph; nothing is logged."""
        positions: Tensor | None = None
        mask: Mask | None = None
        if self.document_mask:
            # Of a sequence that several devices share, all of it: a mask says what all tokens see.
            positions, mask = batch["positions"], masks.document(whole(batch, "documents"), causal=True)
        if not self._replays:
            return mean_over_context(self._loss(batch["tokens"], batch["labels"], positions=positions, mask=mask))
        torch.compiler.cudagraph_mark_step_begin()
        # A replay writes its results where the last one did: what outlives the step is copied.
        return self._loss(batch["tokens"], batch["labels"], positions=positions, mask=mask).clone()
