"""metrics.csv: one table over a run's whole life."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from tiny_training import TinyData, TinyTask, tiny_trainer

from flashtrain.errors import UserError
from flashtrain.training.checkpoint_callbacks import SaveLast
from flashtrain.training.checkpoints import AtomicCheckpointIO, find_resumable
from flashtrain.training.loggers import MetricsFile, read_metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.csv"


def test_what_is_logged_for_one_step_is_one_row(path):
    logger = MetricsFile(path)
    logger.log_metrics({"train_loss": 2.0}, step=0)
    logger.log_metrics({"lr": 0.1}, step=0)
    logger.log_metrics({"train_loss": 1.5, "lr": 0.2}, step=1)
    logger.finalize("success")
    columns, rows = read_metrics(path)
    assert columns == ["step", "train_loss", "lr"]
    assert [tuple(row.values()) for row in rows] == [("0", "2.0", "0.1"), ("1", "1.5", "0.2")]


def test_a_row_has_the_epoch_of_its_step_though_its_validation_came_after_the_epoch(path):
    metrics = MetricsFile(path)
    metrics.log_metrics({"loss": 1.0, "epoch": 0}, 3)
    metrics.log_metrics({"validation_loss": 2.0, "epoch": 1}, 3)
    metrics.finalize("success")
    assert read_metrics(path)[1] == [{"step": "3", "loss": "1.0", "epoch": "0", "validation_loss": "2.0"}]


def test_a_later_metric_adds_its_column_and_keeps_the_rows(path):
    logger = MetricsFile(path)
    logger.log_metrics({"train_loss": 2.0}, step=0)
    logger.log_metrics({"train_loss": 1.0, "validation_loss": 3.0}, step=1)
    logger.finalize("success")
    _, rows = read_metrics(path)
    assert rows[0] == {"step": "0", "train_loss": "2.0", "validation_loss": ""}
    assert rows[1]["validation_loss"] == "3.0"


def test_the_same_metric_twice_in_a_step_is_two_rows(path):
    logger = MetricsFile(path)
    logger.log_metrics({"loss": 2.0, "epoch": 0}, step=4)
    logger.log_metrics({"loss": 1.0, "epoch": 0}, step=4)
    logger.finalize("success")
    assert [row["loss"] for row in read_metrics(path)[1]] == ["2.0", "1.0"]


def test_what_comes_again_with_every_micro_batch_is_no_row_of_its_own(path):
    logger = MetricsFile(path)
    for _ in range(3):
        logger.log_metrics({"lr": 0.5}, step=4)
    logger.log_metrics({"loss": 1.0}, step=4)
    logger.finalize("success")
    assert [(row["lr"], row["loss"]) for row in read_metrics(path)[1]] == [("0.5", "1.0")]


def test_rows_are_on_disk_while_the_run_goes_on(path):
    logger = MetricsFile(path)
    for step in range(3):
        logger.log_metrics({"loss": 1.0}, step=step)
    assert [row["step"] for row in read_metrics(path)[1]] == ["0", "1"]


def test_a_resumed_run_continues_the_file_and_replaces_what_it_repeats(tmp_path):
    def fit(steps, resume=None):
        trainer = tiny_trainer(
            tmp_path,
            SaveLast(tmp_path, every_n_steps=2),
            plugins=[AtomicCheckpointIO()],
            logger=MetricsFile(tmp_path / "metrics.csv"),
            log_every_n_steps=1,
            max_steps=steps,
        )
        trainer.fit(TinyTask(), datamodule=TinyData(), ckpt_path=resume)
        return read_metrics(tmp_path / "metrics.csv")[1]

    fit(4)
    first = fit(2)  # begins anew at step 0: the old rows go
    assert [row["step"] for row in first] == ["0", "1"]
    resumed = fit(6, find_resumable(tmp_path))
    assert [row["step"] for row in resumed] == ["0", "1", "2", "3", "4", "5"]
    assert resumed[:2] == first
    assert all(row["train_loss"] and row["gradient_norm"] for row in resumed)


def test_a_run_killed_while_a_column_is_added_has_every_row_that_was_flushed(path, monkeypatch):
    metrics = MetricsFile(path)
    metrics.log_metrics({"loss": 2.0}, 0)
    metrics.log_metrics({"loss": 1.0}, 1)
    metrics.flush()  # as a checkpoint of this step has it behind it
    metrics.log_metrics({"validation_loss": 3.0}, 1)
    seen = []
    real = {name: getattr(Path, name) for name in ("replace", "open")}

    def watched(name):
        def call(*words, **named):
            with monkeypatch.context() as as_it_is:
                as_it_is.setattr(Path, "open", real["open"])
                seen.append(losses(path))
            return real[name](*words, **named)

        return call

    for name in real:
        monkeypatch.setattr(Path, name, watched(name))
    metrics.finalize("success")
    monkeypatch.undo()
    assert len(seen) >= 2
    assert all(found == ["2.0", "1.0"] for found in seen)
    assert losses(path) == ["2.0", "1.0"]


def test_a_run_that_goes_on_writes_into_the_row_of_its_checkpoints_step(path):
    first = MetricsFile(path)
    first.log_metrics({"loss": 2.0}, 0)
    first.log_metrics({"loss": 1.0}, 1)
    first.flush()
    second = MetricsFile(path)
    second.continue_from(2)
    second.log_metrics({"validation_loss": 3.0}, 1)
    second.log_metrics({"loss": 0.5}, 2)
    second.finalize("success")
    _, rows = read_metrics(path)
    assert [row["loss"] for row in rows] == ["2.0", "1.0", "0.5"]
    assert [row["validation_loss"] for row in rows] == ["", "3.0", ""]


def losses(path):
    with path.open(newline="") as file:
        return [row["loss"] for row in csv.DictReader(file)]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    logger = MetricsFile(tmp_path / "file" / "metrics.csv")
    logger.log_metrics({"loss": 1.0}, step=0)
    with pytest.raises(UserError, match=r"could not write .*metrics\.csv"):
        logger.finalize("success")


NO_METRICS = {
    "a long field": "step,loss\n0," + "9" * 200_000 + "\n",
    "no steps": "epoch,loss\n0,1\n",
    "a column twice": "step,loss,loss\n0,1,2\n",
    "no UTF-8": "step,loss\n0,\udcff\n",
    "no rows of text": "\x00\x01\x02",
}


@pytest.mark.parametrize("content", NO_METRICS.values(), ids=NO_METRICS.keys())
def test_a_file_that_is_none_is_one_line(path, content):
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"metrics\.csv") as caught:
        read_metrics(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", NO_METRICS.values(), ids=NO_METRICS.keys())
def test_a_run_that_finds_such_a_file_keeps_it_beside_its_own(path, content, caplog):
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    before = path.read_bytes()
    logger = MetricsFile(path)
    with caplog.at_level("INFO"):
        logger.log_metrics({"loss": 1.0}, step=5)
    logger.finalize("success")
    assert read_metrics(path) == (["step", "loss"], [{"step": "5", "loss": "1.0"}])
    assert path.with_name("metrics.csv.unreadable").read_bytes() == before
    assert "metrics.csv.unreadable" in caplog.text


@pytest.mark.parametrize("step", ["\u00b2", "9" * 5000, "-1", "x", "", "1.5"])
def test_rows_without_a_step_are_left_out(path, step):
    path.write_text(f"step,loss\n0,1.0\n{step},2.0\n3\n1,2,3,4\n", encoding="utf-8")
    logger = MetricsFile(path)
    logger.log_metrics({"loss": 1.0}, step=5)
    logger.finalize("success")
    assert [row["step"] for row in read_metrics(path)[1]] == ["0", "3", "1", "5"]


def test_a_spreadsheet_computes_nothing_of_what_was_there(path):
    path.write_text('step,=A1,loss\n0,"=1+1\x1b[2J",-1.5\n', encoding="utf-8")
    logger = MetricsFile(path)
    logger.log_metrics({"loss": 1.0}, step=5)
    logger.finalize("success")
    lines = path.read_text(encoding="utf-8").split("\n")
    assert lines[:2] == ["step,'=A1,loss", "0,'=1+1\\x1b[2J,-1.5"]
