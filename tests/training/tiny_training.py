"""A language model of a few hundred weights and a resumable data module, for testing
what surrounds a model."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from flashtrain.distributed.sharding import shard
from flashtrain.training.checkpoints import AtomicCheckpointIO
from flashtrain.training.gradient_clipping import clip_gradients, gradient_scale
from flashtrain.training.optimizers import adamw
from flashtrain.training.schedules import cosine_with_warmup

VOCABULARY = 17
CONTEXT = 8


class TinyModel(nn.Module):
    """Tokens (B, S) -> mean cross-entropy of predicting the next; embedding and
    head tied, two blocks."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 2 * width),
                nn.GELU(),
                nn.Linear(2 * width, width),
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x) @ self.embedding.weight.T

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class TinyTask(pl.LightningModule):
    """Trains TinyModel; `losses` holds every micro-batch's training loss. `poison` makes the
    loss NaN at that step."""

    def __init__(self, total_steps: int = 20, lr: float = 1e-2, poison: int | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.total_steps, self.lr, self.poison = total_steps, lr, poison
        self.losses: list[float] = []
        torch.manual_seed(0)
        self.model = TinyModel()
        self.configured = False

    def configure_model(self) -> None:
        mesh = getattr(self, "_device_mesh", None)
        if mesh is not None and not self.configured:
            shard(self.model, mesh)
        self.configured = True

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.model.loss(batch["tokens"])
        if self.poison is not None and self.trainer.global_step + 1 == self.poison:
            loss = loss * float("nan")
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("validation_loss", self.model.loss(batch["tokens"]), sync_dist=True)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None, **_: Any
    ) -> None:
        scale = gradient_scale(self.trainer, optimizer)
        self.log("gradient_norm", clip_gradients(self.model, gradient_clip_val, scale))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = adamw(self.model, lr=self.lr)
        schedule = cosine_with_warmup(optimizer, 2, self.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Samples(Dataset):
    """Sample i is a run of consecutive numbers, always the same for the same i."""

    def __init__(self, first: int, count: int, stride: int) -> None:
        self.first, self.count, self.stride = first, count, stride

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = (self.first + index * self.stride) * 7
        return {"tokens": (start + torch.arange(CONTEXT + 1) * (1 + start % 3)) % VOCABULARY}


class ResumableLoader(DataLoader):
    """A loader that continues after the batches a restored run has seen: Lightning asks
    loaders for such a state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]

    def __iter__(self) -> Any:
        for index, batch in enumerate(super().__iter__()):
            if index >= self.seen:
                self.seen = index + 1
                yield batch


class TinyData(pl.LightningDataModule):
    """Rank r of W reads samples r, r + W, r + 2W, ...: a global batch holds the
    same samples for every W."""

    def __init__(self, batch_size: int = 4, batches: int = 64) -> None:
        super().__init__()
        self.batch_size, self.batches = batch_size, batches

    def train_dataloader(self) -> DataLoader:
        world, rank = self.trainer.world_size, self.trainer.global_rank
        return ResumableLoader(
            Samples(rank, self.batches * self.batch_size, world), batch_size=self.batch_size
        )

    def val_dataloader(self) -> DataLoader:
        world, rank = self.trainer.world_size, self.trainer.global_rank
        samples = Samples(10_000 + rank, self.batch_size, world)
        # training draws the others.
        return DataLoader(samples, batch_size=self.batch_size, generator=torch.Generator())

    def state_dict(self) -> dict[str, int]:
        return {"vocabulary": VOCABULARY}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["vocabulary"] != VOCABULARY:
            raise ValueError("another vocabulary")


def tiny_trainer(folder: Any, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """A Trainer on the CPU without bars, files or sanity checks, but for what is given."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": -1,
        "max_steps": 6,
        "logger": False,
        "enable_progress_bar": any(isinstance(c, pl.callbacks.ProgressBar) for c in callbacks),
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks),
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "log_every_n_steps": 2,
        "use_distributed_sampler": False,
        "gradient_clip_val": 1.0,
        "default_root_dir": str(folder),
    }
    return pl.Trainer(**{**defaults, **options}, callbacks=list(callbacks))


def tiny_fit(
    folder: Any,
    *callbacks: pl.Callback,
    task: TinyTask | None = None,
    resume: Any = None,
    **options: Any,
) -> TinyTask:
    """Train a TinyTask, or the one given, with whole checkpoints."""
    task = task or TinyTask()
    trainer = tiny_trainer(folder, *callbacks, **{"plugins": [AtomicCheckpointIO()], **options})
    trainer.fit(task, datamodule=TinyData(), ckpt_path=resume)
    return task
