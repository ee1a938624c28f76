"""What each of two gloo ranks does for test_strategies.py; run as a script, which forks them for each scenario.

    python two_ranks.py FOLDER

Each rank writes FOLDER/NAME/RANK.json for the scenarios ddp, fsdp and stopping; their exit codes are in codes.json.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from ranks import end, fork, full_state_dict, report
from tiny_training import TinyData, TinyTask, tiny_trainer

from flashtrain.distributed.strategies import make_strategy
from flashtrain.errors import UserError
from flashtrain.training import signals
from flashtrain.training.checkpoint_callbacks import SaveLast, checkpoint_callbacks
from flashtrain.training.checkpoints import AtomicCheckpointIO
from flashtrain.training.early_stopping import StopOnNonFinite
from flashtrain.training.signals import SaveOnSignal

STEPS = 6


def rank() -> int:
    return int(os.environ["RANK"])


def fit(
    folder: Path,
    strategy: str,
    *callbacks: pl.Callback,
    task: TinyTask | None = None,
    resume: Any = None,
    **options: Any,
) -> TinyTask:
    """Train on both ranks with 4 of the 8 samples of a step each."""
    task = task or TinyTask()
    trainer = tiny_trainer(
        folder,
        *callbacks,
        devices=2,
        strategy=make_strategy(strategy),
        plugins=[AtomicCheckpointIO()],
        **options,
    )
    trainer.fit(task, datamodule=TinyData(batch_size=4), ckpt_path=resume)
    return task


def strategy_scenario(folder: Path, strategy: str) -> dict[str, Any]:
    """A whole run, one that accumulates, and a summary of the weights."""
    whole = fit(
        folder,
        strategy,
        *checkpoint_callbacks(folder / "whole", 2),
        max_steps=STEPS,
        limit_val_batches=1,
        val_check_interval=3,
    )
    weights = full_state_dict(whole.model)
    if rank() == 0:
        torch.save(weights, folder / "weights.pt")
    accumulated = fit(folder, strategy, max_steps=3, accumulate_grad_batches=2)
    return {
        "losses": whole.losses,
        "accumulated": accumulated.losses,
        "gathered": sorted(weights),
    }


class SignalAt(pl.Callback):
    """Sends a signal to one rank's own process in the middle of a step (the first of two accumulated batches)."""

    def __init__(self, rank: int, batch: int, number: int) -> None:
        self.rank, self.batch, self.number = rank, batch, number

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and batch_idx == self.batch:
            os.kill(os.getpid(), self.number)


def stopping_scenario(folder: Path) -> dict[str, Any]:
    """SIGTERM to the second rank only; then a loss that becomes NaN on the second rank only."""
    signals.MAX_STEPS_APART = 8  # ask often: a hundred steps over gloo are slow where other processes want the cores
    stop = SaveOnSignal()
    stopped = fit(
        folder,
        "ddp",
        stop,
        SaveLast(folder / "stopped"),
        SignalAt(rank=1, batch=4, number=signal.SIGTERM),
        max_steps=400,
        accumulate_grad_batches=2,
        limit_val_batches=1,
    )
    at = stop.stopped_at
    resumed = fit(
        folder,
        "ddp",
        max_steps=(at or 0) + 2,
        accumulate_grad_batches=2,
        resume=folder / "stopped" / "last.ckpt" if at else None,
    )
    message = ""
    poisoned = TinyTask(poison=3 if rank() == 1 else None)
    try:
        fit(folder, "ddp", StopOnNonFinite(), task=poisoned, max_steps=8, log_every_n_steps=4)
    except UserError as error:
        message = str(error)
    return {
        "stopped_at": at,
        "exit_code": stop.exit_code,
        "losses": stopped.losses + resumed.losses,
        "handlers_restored": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "message": message,
    }


def scenario(folder: Path, name: str) -> None:
    warnings.filterwarnings("ignore")
    report(folder, stopping_scenario(folder) if name == "stopping" else strategy_scenario(folder, name))
    end()


def main(folder: Path) -> None:
    for name in ("ddp", "fsdp", "stopping"):
        fork(2, scenario, folder / name, name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
