"""What gloo ranks do for test_sharded_checkpoints.py; run as a script, which forks
them for each scenario.

python sharded_ranks.py FOLDER
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from ranks import end, fork, full_state_dict, report
from tiny_training import TinyData, TinyTask, tiny_trainer
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from flashtrain.distributed.sharded_checkpoints import FullyShardedStrategy
from flashtrain.errors import UserError
from flashtrain.training import sharded
from flashtrain.training.checkpoint_callbacks import SaveLast, checkpoint_callbacks
from flashtrain.training.checkpoints import AtomicCheckpointIO


class TiedTask(TinyTask):
    """With a weight that has two names, as a tied head's."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.model.head = torch.nn.Linear(12, 17, bias=False)
        self.model.head.weight = self.model.embedding.weight


def fit(
    folder: Path,
    ranks: int,
    *callbacks: Any,
    shards: bool = True,
    resume: Any = None,
    **options: Any,
) -> TinyTask:
    """Train on all ranks with the 8 samples of a step sharded among them."""
    task = TiedTask()
    trainer = tiny_trainer(
        folder,
        *callbacks,
        devices=ranks,
        strategy=FullyShardedStrategy(save_distributed_checkpoint=shards),
        plugins=[AtomicCheckpointIO()],
        **options,
    )
    trainer.fit(task, datamodule=TinyData(batch_size=8 // ranks), ckpt_path=resume)
    return task


def two(folder: Path) -> None:
    """Nine steps; six with a checkpoint each and a best one; nine that change
    between files and folders."""
    whole = fit(folder, 2, max_steps=9)
    options = {"limit_val_batches": 1, "val_check_interval": 3}
    began = fit(folder, 2, *checkpoint_callbacks(folder / "run", 1), max_steps=6, **options)
    weights = full_state_dict(began.model)
    if os.environ["RANK"] == "0":
        torch.save(weights, folder / "weights.pt")
    switched = fit(folder, 2, SaveLast(folder / "switched"), shards=False, max_steps=2)
    kinds = [(folder / "switched" / "last.ckpt").is_dir()]
    for shards, steps in ((True, 4), (False, 6), (True, 9)):
        callback, path = SaveLast(folder / "switched"), folder / "switched" / "last.ckpt"
        switched.losses += fit(
            folder, 2, callback, shards=shards, max_steps=steps, resume=path
        ).losses
        kinds.append(path.is_dir())
    report(folder, {"losses": whole.losses, "switched": switched.losses, "folders": kinds})
    end()


def four(folder: Path, checkpoint: Path) -> None:
    resumed = fit(folder, 4, SaveLast(folder / "run"), max_steps=8, resume=checkpoint)
    report(folder, {"resumed": resumed.losses})
    end()


def going_on(folder: Path) -> None:
    """A checkpoint of step 1 is written no sooner than after step 3; which weights are in it?"""
    later, real = threading.Event(), sharded.ShardWriter._write
    waited: list[bool] = []

    def late(self: Any, *arguments: Any) -> None:
        waited.append(later.wait(600))
        real(self, *arguments)

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *arguments: Any) -> None:
            if trainer.global_step == 1:
                weights = full_state_dict(pl_module.model)
                if weights:
                    torch.save(weights, folder / "weights.pt")
            if trainer.global_step == 3:
                later.set()

    sharded.ShardWriter._write = late  # type: ignore[method-assign]
    fit(folder, 2, Watch(), OneSave(folder / "last.ckpt"), max_steps=4)
    report(folder, {"waited": waited})
    end()


class OneSave(pl.Callback):
    """Writes one checkpoint after the first step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *arguments: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)


def full_disk(folder: Path) -> None:
    """The disk is full for the second rank's part of the second checkpoint; then for the
    first rank's current.json."""
    found = {}
    owners = {"part": (HuggingFaceStorageWriter, "write_data"), "current": (sharded, "_take_place")}
    for name, (owner, function) in owners.items():
        real, calls = getattr(owner, function), []

        def second(
            *arguments: Any, real: Any = real, calls: list[int] = calls, name: str = name
        ) -> Any:
            calls.append(1)
            if len(calls) == 2 and (name == "current" or os.environ["RANK"] == "1"):
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments)

        setattr(owner, function, second)
        try:
            fit(folder, 2, SaveLast(folder / name, 1), max_steps=6)
        except UserError as error:
            found[name] = str(error)
        finally:
            setattr(owner, function, real)
    report(folder, found)
    end()


def main() -> None:
    folder = Path(sys.argv[1])
    last = folder / "two" / "run" / "last.ckpt"
    for function, ranks, arguments in (
        (two, 2, ()),
        (four, 4, (last,)),
        (going_on, 2, ()),
        (full_disk, 2, ()),
    ):
        fork(ranks, function, folder / function.__name__, *arguments)


if __name__ == "__main__":
    main()
