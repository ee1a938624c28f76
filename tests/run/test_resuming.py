"""A run that died goes on as if it had not: dropout, losses, metrics, validations; and what a checkpoint may not do."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from tiny_runs import TinyRuns
from transformers import get_linear_schedule_with_warmup

from flashtrain import registry
from flashtrain.training.checkpoints import read_checkpoint, save_atomically

pytestmark = pytest.mark.integration  # whole runs

DROPOUT = ("model.dropout=0.1", "trainer.log_every=2")


class Died(Exception):
    """What stands for a process that was killed: nothing of the run is told."""


class InValidation(pl.Callback):
    """Does something in the first batch of the first validation after `step`."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act, self.done = step, act, False

    def on_validation_batch_start(self, trainer, *_) -> None:
        if trainer.global_step == self.step and not self.done:
            self.done = True
            self.act()


def die() -> None:
    raise Died


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def outcome(folder: Path) -> dict[str, Any]:
    """What must not depend on whether a run was interrupted."""
    row = json.loads((folder / "summary.json").read_text())
    lines = (folder / "metrics.csv").read_text().splitlines()
    names = lines[0].split(",")
    timed = {"tokens_per_second", "model_tflops", "mfu", "step_seconds", "peak_memory_gib"}
    rows = [{n: v for n, v in zip(names, line.split(","), strict=True) if n not in timed} for line in lines[1:]]
    saved = {name: read_checkpoint(folder / "checkpoints" / f"{name}.ckpt") for name in ("last", "best")}
    return {
        "row": {name: row[name] for name in ("status", "train_loss_first", "train_loss", "validation_loss", "steps")},
        "metrics": rows,
        "steps": {name: checkpoint["global_step"] for name, checkpoint in saved.items()},
        "weights": {
            (name, key): value.tolist()
            for name, checkpoint in saved.items()
            for key, value in checkpoint["state_dict"].items()
        },
    }


@pytest.fixture(scope="module")
def uninterrupted(tiny_runs: TinyRuns) -> dict[str, Any]:
    status, folder = tiny_runs.run("uninterrupted", *DROPOUT)
    assert status == 0
    return outcome(folder)


@pytest.mark.parametrize("step", [3, 6], ids=["midway", "after the last step"])
@pytest.mark.parametrize(("act", "status"), [(die, 1), (ask_to_stop, 143)], ids=["killed", "SIGTERM"])
def test_a_run_that_ends_in_a_validation_goes_on_to_the_same_end(
    tiny_runs: TinyRuns, uninterrupted, monkeypatch, step: int, act: Any, status: int
) -> None:
    callback = InValidation(step, act)
    monkeypatch.setitem(registry._components["callback"], "strike", lambda _: callback)
    found, folder = tiny_runs.run(f"struck-{step}-{status}", *DROPOUT, "trainer.callbacks=[strike]")
    assert found == status
    said = json.loads((folder / "summary.json").read_text())
    if status == 143:
        assert said["status"] == "stopped"
        assert f"at step {step}" in said["error"]
    assert read_checkpoint(folder / "checkpoints" / "last.ckpt")["global_step"] == step
    found, _ = tiny_runs.run(folder.name, *DROPOUT, f"resume={folder}")
    assert found == 0
    assert outcome(folder) == uninterrupted


class InStep(pl.Callback):
    """Raises before the second of the fifth step's two micro-batches."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == 9:
            raise Died


def test_a_run_that_crashes_in_a_step_goes_on_from_the_step_before_to_the_same_end(
    tiny_runs: TinyRuns, uninterrupted, monkeypatch, capsys
) -> None:
    words = (*DROPOUT, "trainer.checkpoint_every=100")
    monkeypatch.setitem(registry._components["callback"], "strike", lambda _: InStep())
    status, folder = tiny_runs.run("crashed", *words, "trainer.callbacks=[strike]")
    assert status == 1
    assert "Died" in capsys.readouterr().err
    assert read_checkpoint(folder / "checkpoints" / "last.ckpt")["global_step"] == 4
    status, _ = tiny_runs.run(folder.name, *words, f"resume={folder}")
    assert status == 0
    assert outcome(folder) == uninterrupted


@pytest.mark.gpu
def test_dropout_on_a_gpu_goes_on_with_the_numbers_that_were_next(tiny_runs: TinyRuns, monkeypatch) -> None:
    on_gpu = ("hardware=gpu", "trainer.compile=false", "model.dropout=0.3")
    status, whole = tiny_runs.run("whole-on-a-gpu", *on_gpu)
    assert status == 0
    monkeypatch.setitem(registry._components["callback"], "die", lambda _: InValidation(3, die))
    status, folder = tiny_runs.run("on-a-gpu", *on_gpu, "trainer.callbacks=[die]")
    assert status == 1
    status, _ = tiny_runs.run("on-a-gpu", *on_gpu, f"resume={folder}")
    assert status == 0
    losses = [[row["train_loss"] for row in outcome(path)["metrics"]] for path in (whole, folder)]
    # Sums on a GPU may be in another order; other masks would change a loss by a percent.
    assert [float(loss) for loss in losses[1] if loss] == pytest.approx(
        [float(loss) for loss in losses[0] if loss], rel=1e-4
    )


def test_sigterm_in_a_validation_at_which_no_checkpoint_was_due_leaves_one_of_that_step(
    tiny_runs: TinyRuns, monkeypatch
) -> None:
    words = (*DROPOUT, "trainer.checkpoint_every=100")
    status, whole = tiny_runs.run("rare", *words)
    assert status == 0
    callback = InValidation(3, ask_to_stop)
    monkeypatch.setitem(registry._components["callback"], "strike", lambda _: callback)
    status, folder = tiny_runs.run("rare-struck", *words, "trainer.callbacks=[strike]")
    assert status == 143
    assert read_checkpoint(folder / "checkpoints" / "last.ckpt")["global_step"] == 3
    status, _ = tiny_runs.run(folder.name, *words, f"resume={folder}")
    assert status == 0
    assert outcome(folder) == outcome(whole)


@pytest.mark.parametrize("states", ["full", "host"])
def test_a_run_that_goes_on_beyond_its_end_has_the_rates_of_its_new_length(tiny_runs: TinyRuns, states: str) -> None:
    words = ("schedule=linear", "schedule.minimum_ratio=0", f"optimizer.states={states}")
    status, folder = tiny_runs.run(f"longer-{states}", *words)
    assert status == 0
    status, _ = tiny_runs.run(folder.name, *words, "trainer.steps=12", f"resume={folder}")
    assert status == 0
    schedule = get_linear_schedule_with_warmup(torch.optim.SGD([torch.zeros(1)], lr=1.0), 1, 13)
    factor = schedule.lr_lambdas[0]  # ours leaves its first rate out, which is 0
    rows = [{name[:3]: value for name, value in row.items()} for row in outcome(folder)["metrics"]]
    rates = [float(row["lr-"]) for row in rows if row["lr-"]]
    assert rates[6:] == pytest.approx([0.003 * factor(step + 1) for step in range(6, 12)])
    assert min(rates) > 0


@pytest.fixture(scope="module")
def half(tiny_runs: TinyRuns) -> Path:
    """A run that was stopped after its third step of six."""
    callback = InValidation(3, ask_to_stop)
    registry.register("callback", "half")(lambda _: callback)
    status, folder = tiny_runs.run("half", "trainer.callbacks=[half]")
    assert status == 143
    return folder


def resumed(tiny_runs: TinyRuns, half: Path, name: str, change: Any) -> tuple[int, dict[str, Any], Path]:
    """Go on from a copy of that run whose checkpoint was changed. Returns (status, summary row, folder)."""
    folder = tiny_runs.folder / name
    (folder / "checkpoints").mkdir(parents=True)
    for file in ("config.yaml", "summary.json", "metrics.csv"):
        (folder / file).write_bytes((half / file).read_bytes())
    checkpoint = read_checkpoint(half / "checkpoints" / "last.ckpt")
    change(checkpoint, folder)
    save_atomically(checkpoint, folder / "checkpoints" / "last.ckpt")
    (folder / "checkpoints" / "best.ckpt").write_bytes((half / "checkpoints" / "last.ckpt").read_bytes())
    status, _ = tiny_runs.run(name, f"resume={folder}")
    return status, json.loads((folder / "summary.json").read_text()), folder


@pytest.mark.parametrize("where", ["local://{}", "{}", "checkpoints/../../{name}"])
def test_a_path_in_a_checkpoint_is_never_believed(tiny_runs: TinyRuns, half: Path, tmp_path: Path, where) -> None:
    victim = tiny_runs.folder / f"victim-{len(where)}"
    victim.write_text("somebody else's")

    def poison(checkpoint: dict[str, Any], folder: Path) -> None:
        path = where.format(victim, name=victim.name)
        path = path if "{}" in where or path.startswith("local") else str(folder / path)
        state = {
            "monitor": "validation_loss", "best_model_score": torch.tensor(99.0), "best_model_path": path,
            "current_score": torch.tensor(99.0), "dirpath": str(folder / "checkpoints"),
            "best_k_models": {path: torch.tensor(99.0)}, "kth_best_model_path": path,
            "kth_value": torch.tensor(99.0), "last_model_path": path,
        }  # fmt: skip
        for key in checkpoint["callbacks"]:
            if key.startswith("BestCheckpoint"):
                checkpoint["callbacks"][key] = state

    status, row, _ = resumed(tiny_runs, half, f"poisoned-{len(where)}", poison)
    assert (status, row["status"]) == (0, "finished")
    assert victim.read_text() == "somebody else's"


def test_a_run_does_not_go_on_from_its_best_weights(tiny_runs: TinyRuns, trained: Path) -> None:
    words = ("trainer.steps=12", f"resume={trained / 'checkpoints' / 'best.ckpt'}")
    status, folder = tiny_runs.run("from-best", *words)
    assert status == 2
    assert "no state of the optimiser and schedule" in json.loads((folder / "summary.json").read_text())["error"]
