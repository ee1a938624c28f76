"""What each of two gloo ranks does for test_strategies.py; run as a script, which forks
them for each scenario.

    python two_ranks.py FOLDER

Each rank writes FOLDER/NAME/RANK.json for the scenarios ddp, fsdp, stopping and experts. Their exit
codes are in FOLDER/NAME/codes.json.
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
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flashtrain.distributed.strategies import make_strategy
from flashtrain.errors import UserError
from flashtrain.training import signals
from flashtrain.training.checkpoint_callbacks import SaveLast, checkpoint_callbacks
from flashtrain.training.checkpoints import AtomicCheckpointIO
from flashtrain.training.early_stopping import StopOnNonFinite
from flashtrain.training.optimizers import muon
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
    """Sends a signal to one rank's own process in the middle of a step (the first of
    two accumulated batches)."""

    def __init__(self, rank: int, batch: int, number: int) -> None:
        self.rank, self.batch, self.number = rank, batch, number

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_rank == self.rank and batch_idx == self.batch:
            os.kill(os.getpid(), self.number)


def stopping_scenario(folder: Path) -> dict[str, Any]:
    """SIGTERM to the second rank only; then a loss that becomes NaN on the second rank only."""
    # Ask often: a hundred steps over gloo are slow where other processes want the cores.
    signals.MAX_STEPS_APART = 8
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


class Experts(torch.nn.Module):
    """A layer with so many experts; of one expert the second rank has none."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Parameter(torch.randn(count, 12, 8))
        self.router = torch.nn.Parameter(torch.randn(count, 8))
        self.inside = torch.nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            self.inside((torch.einsum("ncd,bd->bnc", self.up, x).amax(-1) @ self.router).tanh())
            .square()
            .mean()
        )


def trained_experts(count: int, mesh: Any = None) -> list[list[float]]:
    """The weights after three steps of Muon, sharded over the mesh's ranks if there is one,
    and resumed before each."""
    model = Experts(count)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = muon(model, lr=1e-2)
    for number in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number))).backward()
        optimizer.step()
        if mesh is not None:
            saved = states.get_optimizer_state_dict(model, optimizer)
            optimizer = muon(model, lr=1e-2)
            states.set_optimizer_state_dict(model, optimizer, saved)
    return [
        getattr(one, "full_tensor", lambda one=one: one)().flatten().tolist()
        for one in model.parameters()
    ]


def experts_scenario() -> dict[str, Any]:
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    return {
        str(count): [trained_experts(count), trained_experts(count, mesh)] for count in (1, 3, 4)
    }


def scenario(folder: Path, name: str) -> None:
    warnings.filterwarnings("ignore")
    if name == "experts":
        report(folder, experts_scenario())
    else:
        report(
            folder,
            stopping_scenario(folder) if name == "stopping" else strategy_scenario(folder, name),
        )
    end()


def main(folder: Path) -> None:
    for name in ("ddp", "fsdp", "stopping", "experts"):
        fork(2, scenario, folder / name, name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
