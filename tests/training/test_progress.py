"""What a user sees while training."""

from __future__ import annotations

import copy
import re

import pytest
import pytorch_lightning as pl
import torch
from tiny_training import TinyData, TinyTask, tiny_trainer

from flashtrain.training.checkpoint_callbacks import SaveLast
from flashtrain.training.loggers import LogRates
from flashtrain.training.metrics_file import METRICS, MetricsFile, read_metrics
from flashtrain.training.progress import LineProgress
from flashtrain.training.throughput import Throughput


def fit(folder, progress, **options):
    task = TinyTask()
    tiny_trainer(folder, Throughput(), progress, **options).fit(task, datamodule=TinyData())
    return task


def step_lines(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]


def test_a_log_gets_plain_lines_for_the_first_every_nth_and_last_step(tmp_path, capsys):
    fit(tmp_path, LineProgress(every_n_steps=4), max_steps=10)
    lines = step_lines(capsys)
    assert [line.split()[1] for line in lines] == ["1/10", "4/10", "8/10", "10/10"]
    full = r"step 8/10 loss \d+\.\d{3} lr \d\.\de-\d\d tokens/s [\d,]+ \d+:\d\d:\d\d left"
    assert re.fullmatch(full, lines[2])


def test_the_loss_shown_is_the_mean_over_the_accumulated_batches(tmp_path, capsys):
    task = fit(tmp_path, LineProgress(every_n_steps=1), max_steps=2, accumulate_grad_batches=2)
    shown = [float(line.split()[3]) for line in step_lines(capsys)]
    assert shown == pytest.approx([sum(task.losses[:2]) / 2, sum(task.losses[2:]) / 2], abs=1e-3)


def test_a_long_first_step_says_how_many_of_its_micro_batches_are_done(
    tmp_path, capsys, monkeypatch
):
    fit(tmp_path, LineProgress(), max_steps=2, accumulate_grad_batches=4)
    assert len(step_lines(capsys)) == 2  # a short one has its line alone
    monkeypatch.setattr("flashtrain.training.progress.SECONDS", 0.0)
    fit(tmp_path, LineProgress(), max_steps=2, accumulate_grad_batches=4)
    lines = step_lines(capsys)
    assert [re.fullmatch(rf"step 1 micro-batch {n}/4 \d:\d\d:\d\d left", line) is not None
            for n, line in enumerate(lines[:3], start=1)] == [True] * 3  # fmt: skip
    assert [line.split()[1] for line in lines[3:]] == ["1/2", "2/2"]


# torchao's optimizers have a tensor, which the schedule changes in place.
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_the_rate_shown_and_logged_is_the_one_that_the_step_took(rate, tmp_path, capsys):
    class Scheduled(TinyTask):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=copy.deepcopy(rate))
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    logged = {"logger": MetricsFile(tmp_path / METRICS), "log_every_n_steps": 1}
    callbacks = LineProgress(every_n_steps=1), LogRates()
    tiny_trainer(tmp_path, *callbacks, max_steps=2, **logged).fit(
        Scheduled(), datamodule=TinyData()
    )
    rates = [row["lr-SGD"] for row in read_metrics(tmp_path / METRICS) if "lr-SGD" in row]
    assert rates == pytest.approx([0.1, 0.05])
    assert [re.search(r"lr (\S+)", line)[1] for line in step_lines(capsys)] == [
        "1.0e-01",
        "5.0e-02",
    ]


def test_an_evaluation_says_at_once_how_much_there_is_to_do_and_then_every_some_seconds(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("flashtrain.training.progress.SECONDS", 0.0)

    class Tested(TinyTask):
        test_step = TinyTask.validation_step

    data = TinyData()
    data.test_dataloader = data.val_dataloader
    for name in ("validate", "test"):
        trainer = tiny_trainer(tmp_path, LineProgress(), limit_val_batches=1)
        getattr(trainer, name)(Tested(), datamodule=data, verbose=False)
        assert capsys.readouterr().err.splitlines() == [
            "validating 0/1",
            "validating 1/1 0:00:00 left",
        ]


def test_a_rank_that_shows_nothing_keeps_no_losses(tmp_path):
    class Disabled(LineProgress):
        def setup(self, trainer, pl_module, stage):
            super().setup(trainer, pl_module, stage)
            self.disable()  # as Lightning does on every rank but the first

    progress = Disabled(every_n_steps=1)
    fit(tmp_path, progress, max_steps=3)
    assert not progress._losses


def test_the_time_left_is_that_of_the_steps_without_validation_and_checkpoints(
    tmp_path, capsys, passing
):
    class Slow(pl.Callback):
        def on_before_optimizer_step(self, *_):
            passing(1)

        def on_validation_batch_start(self, *_):
            passing(100)

        def on_save_checkpoint(self, *_):
            passing(100)

    options = {"limit_val_batches": 1, "val_check_interval": 2, "max_steps": 7}
    saving = SaveLast(tmp_path, every_n_steps=3)
    tiny_trainer(tmp_path, LineProgress(every_n_steps=1), Slow(), saving, **options).fit(
        TinyTask(), TinyData()
    )
    left = [line.split()[-2] for line in step_lines(capsys) if re.search(r"lr .* left$", line)]
    assert left == [f"0:00:0{seconds}" for seconds in (5, 4, 3, 2, 1, 0)]


def test_a_validation_gets_its_line(tmp_path, capsys):
    fit(tmp_path, LineProgress(), max_steps=4, limit_val_batches=1, val_check_interval=4)
    assert re.fullmatch(r"step 4 validation loss \d+\.\d{3}", step_lines(capsys)[-1])
