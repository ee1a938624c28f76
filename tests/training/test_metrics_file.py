"""metrics.jsonl: one table over a run's whole life."""

from __future__ import annotations

import math

import pandas
import pytest
import torch

from flashtrain.training.metrics_file import MetricsFile, read_metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_what_is_logged_for_one_step_is_one_row(path):
    logger = MetricsFile(path)
    logger.log_metrics({"train_loss": 2.0}, step=0)
    logger.log_metrics({"lr": torch.tensor(0.5)}, step=0)
    logger.log_metrics({"train_loss": 1.5, "validation_loss": math.nan}, step=1)
    logger.finalize("success")
    table = pandas.read_json(path, lines=True)
    assert list(table.columns) == ["step", "train_loss", "lr", "validation_loss"]
    assert table.train_loss.tolist() == [2.0, 1.5]
    assert read_metrics(path)[0] == {"step": 0, "train_loss": 2.0, "lr": 0.5}


def test_a_row_has_the_epoch_of_its_step_though_its_validation_came_after_the_epoch(path):
    metrics = MetricsFile(path)
    metrics.log_metrics({"loss": 1.0, "epoch": 0}, 3)
    metrics.log_metrics({"validation_loss": 2.0, "epoch": 1}, 3)
    metrics.finalize("success")
    assert read_metrics(path) == [{"step": 3, "loss": 1.0, "epoch": 0, "validation_loss": 2.0}]


def test_the_same_metric_twice_in_a_step_is_two_rows(path):
    logger = MetricsFile(path)
    logger.log_metrics({"loss": 2.0, "epoch": 0}, step=4)
    logger.log_metrics({"loss": 1.0, "epoch": 0}, step=4)
    logger.finalize("success")
    assert [row["loss"] for row in read_metrics(path)] == [2.0, 1.0]


def test_what_comes_again_with_every_micro_batch_is_no_row_of_its_own(path):
    logger = MetricsFile(path)
    for _ in range(3):
        logger.log_metrics({"lr": 0.5}, step=4)
    logger.log_metrics({"loss": 1.0}, step=4)
    logger.finalize("success")
    assert read_metrics(path) == [{"step": 4, "lr": 0.5, "loss": 1.0}]


def test_rows_are_on_disk_while_the_run_goes_on(path):
    logger = MetricsFile(path)
    for step in range(3):
        logger.log_metrics({"loss": 1.0}, step=step)
    assert [row["step"] for row in read_metrics(path)] == [0, 1]


def test_a_run_that_begins_anew_replaces_the_old_rows(path):
    for losses in ([2.0, 1.0, 0.7], [1.5]):
        logger = MetricsFile(path)
        for step, loss in enumerate(losses):
            logger.log_metrics({"loss": loss}, step)
        logger.finalize("success")
    assert read_metrics(path) == [{"step": 0, "loss": 1.5}]


def test_a_run_that_goes_on_writes_into_the_row_of_its_checkpoints_step(path):
    first = MetricsFile(path)
    first.log_metrics({"loss": 2.0}, 0)
    first.log_metrics({"loss": 1.0}, 1)
    first.flush()
    first.log_metrics({"loss": 0.7}, 2)  # after the checkpoint of two steps
    first.flush()
    second = MetricsFile(path)
    second.continue_from(2)
    second.log_metrics({"validation_loss": 3.0}, 1)
    second.log_metrics({"loss": 0.5}, 2)
    second.finalize("success")
    assert [row["loss"] for row in read_metrics(path)] == [2.0, 1.0, 0.5]
    assert [row.get("validation_loss") for row in read_metrics(path)] == [None, 3.0, None]


def test_a_half_line_that_a_kill_left_is_passed_over_and_cut(path):
    path.write_text('{"step": 0, "loss": 2.0}\n{"step": 1, "lo')
    assert read_metrics(path) == [{"step": 0, "loss": 2.0}]
    logger = MetricsFile(path)
    logger.continue_from(1)
    logger.log_metrics({"loss": 1.5}, 1)
    logger.finalize("success")
    assert read_metrics(path) == [{"step": 0, "loss": 2.0}, {"step": 1, "loss": 1.5}]


ROWS = [f'{{"step": {step}, "loss": {step}.5}}\n'.encode() for step in range(6)]


@pytest.mark.parametrize(
    "damaged", [b'{"step": 2, "lo\x00\xff": 2.5}\n', b"\xff\n", b"7\n", b"{}\n", b'{"step": "2"}\n']
)
def test_a_run_goes_on_over_a_damaged_line_and_reports_it(path, caplog, damaged):
    path.write_bytes(b"".join([*ROWS[:2], damaged, *ROWS[3:]]))
    logger = MetricsFile(path)
    with caplog.at_level("INFO"):
        logger.continue_from(5, every=1)
    assert f"{path} has 1 damaged lines" in caplog.text
    logger.log_metrics({"loss": 0.5}, 5)
    logger.finalize("success")
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [
        (0, 0.5),
        (1, 1.5),
        (3, 3.5),
        (4, 4.5),
        (5, 0.5),
    ]
    # What was there stays.
    assert path.read_bytes().startswith(b"".join([*ROWS[:2], damaged, *ROWS[3:5]]))


@pytest.mark.parametrize(("left", "gap"), [(0, "0 to 3"), (2, "2 to 3"), (4, None), (6, None)])
def test_a_run_goes_on_where_lines_are_lost_and_reports_it(path, caplog, left, gap):
    path.write_bytes(b"".join(ROWS[:left]))
    with caplog.at_level("INFO"):
        MetricsFile(path).continue_from(4, every=1)
    assert caplog.messages == (
        [] if gap is None else [f"{path} has no rows of steps {gap}: its curves have a gap there."]
    )


def test_steps_that_are_not_logged_are_not_missed(path, caplog):
    path.write_bytes(b"".join(f'{{"step": {step}}}\n'.encode() for step in (0, 9, 19)))
    with caplog.at_level("INFO"):
        for done in (29, 30):
            MetricsFile(path).continue_from(done, every=10)
    assert len(caplog.messages) == 1  # a row of step 29 is missing
