"""Trainings of a tiny transformers model in float64: what one process and each
of two ranks do alike."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from tiny_training import ResumableLoader, tiny_trainer
from torch.utils.data import DataLoader

from flashtrain.integrations import huggingface_folder
from flashtrain.integrations.huggingface_adapter import adapter_weights
from flashtrain.integrations.huggingface_model import transformers_decoder
from flashtrain.models.activation_checkpointing import MemorySavings
from flashtrain.tasks import LanguageModel
from flashtrain.training.checkpoints import AtomicCheckpointIO
from flashtrain.training.optimizers import adamw

VOCABULARY, STEPS = 61, 6
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


class Rows(torch.utils.data.Dataset):
    """Sample i: a row of two packed documents, always the same for the same i; its labels
    are scored alike often."""

    def __init__(self, first: int, count: int, stride: int) -> None:
        self.first, self.count, self.stride = first, count, stride

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        number = self.first + index * self.stride
        tokens = torch.randint(VOCABULARY, (17,), generator=torch.Generator().manual_seed(number))
        cut = 3 + number % 9
        positions = torch.cat((torch.arange(cut), torch.arange(16 - cut)))
        documents = (torch.arange(16) >= cut).long()
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "positions": positions,
            "documents": documents,
        }


class Data(pl.LightningDataModule):
    """Global batches of 4 rows, whatever the number of ranks."""

    def train_dataloader(self) -> DataLoader:
        world, rank = self.trainer.world_size, self.trainer.global_rank
        return ResumableLoader(Rows(rank, 64 * 4 // world, world), batch_size=4 // world)


class Task(LanguageModel):
    losses: list[float]

    def configure_model(self) -> None:
        torch.manual_seed(0)  # adapters are drawn here, whatever the process has drawn before
        super().configure_model()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss


def fit(
    folder: Path,
    origin: Path | None,
    *callbacks: pl.Callback,
    lora: bool = False,
    resume: Path | None = None,
    start: Path | None = None,
    **options,
) -> Task:
    """Train from a folder's weights, or from random ones, and from the adapters of a checkpoint,
    if `start` is one; options: of the Trainer."""
    torch.manual_seed(0)
    path = None if origin is None else str(origin)
    config = "llama" if origin is None else None
    model = transformers_decoder(
        path, config=config, changes=SIZES if origin is None else None, lora=LORA if lora else None
    )
    if start is not None:
        model.start = adapter_weights(model.module, str(start))
    model.keep_in("64-true")  # by itself: Lightning's FSDP2 knows no such precision
    by_pieces = lora and "RANK" in os.environ  # beside one process, which takes all tokens at once
    model.save_memory(MemorySavings("selective", ffn_chunk=9 if by_pieces else None))
    task = Task(model, make_optimizer=lambda one: adamw(one, lr=1e-2), document_mask=True)
    task.losses = []
    options = {"max_steps": STEPS, "gradient_clip_val": None, **options}
    trainer = tiny_trainer(folder, *callbacks, plugins=[AtomicCheckpointIO()], **options)
    trainer.fit(
        task,
        datamodule=Data(),
        ckpt_path=None if resume is None else str(resume),
        weights_only=True,
    )
    return task


class Reads:
    """Stands before a folder's tensors and keeps how many numbers were read of each at once."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.original = huggingface_folder.opened_weights

    def watch(self) -> None:
        import contextlib

        @contextlib.contextmanager
        def watched(folder: Path) -> Any:
            with self.original(folder) as tensors:
                yield {name: _Watched(name, one, self.sizes) for name, one in tensors.items()}

        huggingface_folder.opened_weights = watched


class _Watched:
    def __init__(self, name: str, slice_: Any, sizes: dict[str, int]) -> None:
        self.name, self.slice, self.sizes = name, slice_, sizes

    def get_shape(self) -> list[int]:
        return self.slice.get_shape()

    def get_dtype(self) -> str:
        return self.slice.get_dtype()

    def __getitem__(self, index: Any) -> torch.Tensor:
        found = self.slice[index]
        self.sizes[self.name] = max(self.sizes.get(self.name, 0), found.numel())
        return found
