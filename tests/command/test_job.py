"""One job: what it trains, what it leaves, how it is stopped, resumed and refused."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest
import pytorch_lightning as pl
import torch
from tiny_runs import TinyRuns

import flashtrain
from flashtrain import registry
from flashtrain.tasks import plan_text
from flashtrain.training.checkpoints import read_checkpoint
from flashtrain.training.metrics_file import METRICS, read_metrics

pytestmark = pytest.mark.integration  # whole runs

SUMMARY_KEYS = {
    "recipe", "model", "parameters", "attention", "context", "batch", "steps", "tokens",
    "train_loss_first",
    "train_loss", "validation_loss", "tokens_per_second", "mfu", "peak_memory_gib", "seconds",
    "device", "versions",
}  # fmt: skip


class SignalAt(pl.Callback):
    """Sends this process one signal when the given optimizer step is done."""

    def __init__(self, step: int, number: signal.Signals) -> None:
        self.step, self.number, self.sent = step, number, False

    def on_train_batch_end(self, trainer, *_) -> None:
        if trainer.global_step == self.step and not self.sent:
            self.sent = True
            os.kill(os.getpid(), self.number)


def weights(folder, name="last.ckpt"):
    return read_checkpoint(folder / "checkpoints" / name)["state_dict"]


def losses(folder) -> dict[int, float]:
    """Training loss by logged step."""
    return {
        row["step"]: row["train_loss"]
        for row in read_metrics(folder / METRICS)
        if "train_loss" in row
    }


def test_a_refused_measurement_leaves_no_folder_of_a_run(tmp_path) -> None:
    with pytest.raises(flashtrain.UserError, match="nosuch"):
        flashtrain.train(
            "bert-speed", hardware="cpu", output=tmp_path, benchmark={"implementations": ["nosuch"]}
        )
    assert not list(tmp_path.glob("*/*"))


def test_the_summary_is_one_flat_row_and_the_loss_fell(trained) -> None:
    row = json.loads((trained / "summary.json").read_text())
    assert row.keys() >= SUMMARY_KEYS
    assert not any(isinstance(value, dict | list) for value in row.values())
    assert (row["status"], row["model"]) == ("finished", "gpt2-demo")
    assert (row["steps"], row["tokens"], row["batch"]) == (6, 6 * 256, 8)
    curve = losses(trained)
    assert len(curve) == 6
    assert (row["train_loss_first"], row["train_loss"]) == pytest.approx((curve[0], curve[5]))
    assert row["train_loss"] < row["train_loss_first"]
    assert row["mfu"] is None  # no peak is known for a CPU


def test_the_validation_after_the_last_step_stands_in_that_steps_row(tiny_runs: TinyRuns) -> None:
    status, folder = tiny_runs.run(
        "validated-after-the-fit", "trainer.steps=4", "trainer.validate_every=3"
    )
    assert status == 0
    rows = read_metrics(folder / METRICS)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert ["validation_loss" in row for row in rows] == [False, False, True, True]


def test_ctrl_c_leaves_a_checkpoint_and_status_130(tiny_runs: TinyRuns, monkeypatch, capfd) -> None:
    monkeypatch.setitem(
        registry._components["callback"], "stop", lambda _: SignalAt(2, signal.SIGINT)
    )
    status, folder = tiny_runs.run("interrupted", "trainer.callbacks=[stop]")
    assert status == 130
    assert read_checkpoint(folder / "checkpoints" / "last.ckpt")["global_step"] in (2, 3)
    assert "SIGINT received" in capfd.readouterr().err


class Lines(pl.Callback):
    """What had been said when the training began."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.caplog, self.before = caplog, []

    def on_train_start(self, *_) -> None:
        self.before = self.caplog.messages


def test_a_training_of_minutes_a_step_on_a_cpu_says_so_before_the_first_step(
    tiny_runs: TinyRuns, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(plan_text, "expected_rate", lambda _: (6e6, "as measured"))
    monkeypatch.setattr(plan_text, "QUICK", 0)
    caplog.set_level("INFO")
    lines = Lines(caplog)
    monkeypatch.setitem(registry._components["callback"], "lines", lambda _: lines)
    status, _ = tiny_runs.run("slow", "trainer.steps=2", "trainer.callbacks=[lines]")
    assert status == 0
    (said,) = [line for line in lines.before if line.startswith("time: ")]
    assert said == "time: about 7 min, 4 min a step (as measured)"


def test_a_quick_training_measures_no_rate(tiny_runs: TinyRuns, monkeypatch) -> None:
    monkeypatch.delattr(plan_text, "expected_rate")
    assert tiny_runs.run("quick", "trainer.steps=1")[0] == 0


def test_a_stopped_run_has_the_steps_and_tokens_that_it_made(tiny_runs: TinyRuns) -> None:
    status, folder = tiny_runs.run("out-of-time", "trainer.max_minutes=1e-6")
    row = json.loads((folder / "summary.json").read_text())
    assert (status, row["status"], row["steps"], row["tokens"]) == (0, "stopped", 1, 256)


class FailAfterSignal(SignalAt):
    """Fails in the step after the signal, as compilation does, whose processes the signal ended."""

    def on_train_batch_start(self, trainer, *_) -> None:
        if trainer.global_step == self.step - 1:
            os.kill(os.getpid(), self.number)
            raise RuntimeError("a process that compiled was ended")


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_that_fails_after_a_signal_leaves_the_status_stopped(
    step: int, tiny_runs: TinyRuns, monkeypatch
) -> None:
    monkeypatch.setitem(
        registry._components["callback"], "fails", lambda _: FailAfterSignal(step, signal.SIGTERM)
    )
    status, folder = tiny_runs.run(f"ended-while-compiling-{step}", "trainer.callbacks=[fails]")
    assert status == 143
    row = json.loads((folder / "summary.json").read_text())
    assert row["status"] == "stopped"
    assert "SIGTERM" in row["error"]
    assert "a process that compiled was ended" in row["error"]


def test_accumulated_micro_batches_train_like_one_batch(tiny_runs: TinyRuns) -> None:
    # In float64: in float32 the two differ by about 1e-5, by more or less on one
    # processor and another.
    folders = []
    for rows in (4, 8):
        status, folder = tiny_runs.run(
            f"rows_{rows}", f"trainer.micro_batch={rows}", "hardware.precision=64-true"
        )
        assert status == 0
        folders.append(folder)
    one, other = map(weights, folders)
    assert all(torch.allclose(one[name], other[name], atol=1e-10) for name in one)


@pytest.mark.parametrize("word", ["trainer.steps=6", "trainer.steps=3", "model=llama"])
def test_a_run_that_cannot_be_continued_keeps_its_settings_and_its_row(
    tiny_runs: TinyRuns, trained, word
) -> None:
    folder = shutil.copytree(trained, tiny_runs.folder / f"kept-{word.replace('=', '-')}")
    before = {name: (folder / name).read_text() for name in ("config.yaml", "summary.json")}
    assert tiny_runs.run(folder.name, word, f"resume={folder}")[0] == 2
    assert {name: (folder / name).read_text() for name in before} == before


def test_the_last_weights_are_the_best_where_the_validation_after_the_last_step_reports_it(
    tiny_runs: TinyRuns,
) -> None:
    status, folder = tiny_runs.run("late-best", "trainer.steps=7", "optimizer.learning_rate=0.0005")
    assert status == 0
    best = read_checkpoint(folder / "checkpoints" / "best.ckpt")
    assert best["global_step"] == 7
    assert all(
        torch.equal(value, best["state_dict"][name]) for name, value in weights(folder).items()
    )


def test_whichever_rank_fails_reports_it_in_the_summary(tiny_runs: TinyRuns, monkeypatch) -> None:
    monkeypatch.setattr("flashtrain.run.job.is_first_rank", lambda: False)
    status, folder = tiny_runs.run(
        "second-rank", "optimizer.learning_rate=1e30", "optimizer.gradient_clip=0"
    )
    assert status == 2
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"


class OutOfMemoryAt(pl.Callback):
    """Raises what PyTorch raises when the GPU is full, once the given optimizer step is done."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, *_) -> None:
        if trainer.global_step == self.step:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity"
            )


def test_a_training_run_that_runs_out_of_memory_reports_its_estimate_and_keeps_its_checkpoint(
    tiny_runs: TinyRuns, trained, monkeypatch
) -> None:
    monkeypatch.setitem(registry._components["callback"], "full", lambda _: OutOfMemoryAt(4))
    status, folder = tiny_runs.run("full", "trainer.callbacks=[full]")
    assert status == 3
    row = json.loads((folder / "summary.json").read_text())
    assert row["status"] == "out of memory"
    for part in (
        "2.00 GiB more were requested",
        "The estimate was",
        "memory.activation_checkpointing=selective",
        f"resume={folder}",
    ):
        assert part in row["error"]
    assert "\n" not in row["error"]

    status, _ = tiny_runs.run(
        "full", f"resume={folder}", "memory.activation_checkpointing=selective"
    )  # in less memory the run is the same
    assert status == 0
    expected, got = weights(trained), weights(folder)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_the_row_says_what_memory_was_saved_and_estimated(tiny_runs: TinyRuns, trained) -> None:
    assert json.loads((trained / "summary.json").read_text())["memory"] == "none"
    status, folder = tiny_runs.run(
        "saved", "memory.activation_checkpointing=full", "memory.ffn_chunk=16", "trainer.steps=2"
    )
    assert status == 0
    row = json.loads((folder / "summary.json").read_text())
    assert row["memory"] == "full checkpointing, feed-forward by 16 tokens"
    assert row["memory_estimate_gib"] > 0


def test_weights_and_biases_offline_gets_the_configuration_and_the_resumed_run_keeps_its_id(
    tiny_runs: TinyRuns, monkeypatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setitem(
        registry._components["callback"], "stop", lambda _: SignalAt(2, signal.SIGTERM)
    )
    status, folder = tiny_runs.run("wandb", "logger=wandb", "trainer.callbacks=[stop]")
    assert status == 143
    first = (folder / "wandb_id.txt").read_text()
    status, folder = tiny_runs.run("wandb", "logger=wandb", "resume=auto")
    assert status == 0
    assert (folder / "wandb_id.txt").read_text() == first
    runs = [
        path.name for path in (folder / "wandb").iterdir() if path.name.startswith("offline-run-")
    ]
    assert len(runs) >= 1
    # offline-run-TIME-ID, and a number after that where both began within a second
    assert {name.split("-")[3] for name in runs} == {first.strip()}


def test_a_sample_that_fails_is_reported_and_the_training_stays_finished(
    tiny_runs, monkeypatch, caplog
) -> None:
    def failing(*_: object, **__: object) -> str:
        raise RuntimeError("probability tensor contains\n inf or nan")

    monkeypatch.setattr("flashtrain.data.tokenizers.ByteTokenizer.decode", failing)
    with caplog.at_level("INFO"):
        status, folder = tiny_runs.run("no_sample", "trainer.steps=1")
    assert status == 0
    assert "no sample of generated text: probability tensor contains" in caplog.text
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
