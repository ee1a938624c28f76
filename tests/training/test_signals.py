"""SIGTERM and Ctrl-C: the step is finished, a checkpoint left, the run can go on."""

from __future__ import annotations

import os
import signal
import time

import pytest
import pytorch_lightning as pl
from tiny_training import TinyData, TinyTask, tiny_fit, tiny_trainer

from flashtrain.errors import causes
from flashtrain.training.checkpoint_callbacks import SaveLast
from flashtrain.training.checkpoints import read_checkpoint
from flashtrain.training.signals import SaveOnSignal

pytestmark = pytest.mark.skipif(
    os.name == "nt", reason="Windows cannot send these signals to its own process"
)


class SendAt(pl.Callback):
    """Sends signals to this process while batch number `batch` is under way."""

    def __init__(self, batch, *numbers):
        self.batch, self.numbers = batch, numbers

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch:
            for number in self.numbers:
                os.kill(os.getpid(), number)


class CountValidations(pl.Callback):
    count = 0

    def on_validation_start(self, *args):
        self.count += 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_mid_accumulation_ends_with_the_optimizer_step_saved(tmp_path, number, code):
    stop = SaveOnSignal()
    task = tiny_fit(
        tmp_path,
        stop,
        SaveLast(tmp_path),
        SendAt(4, number),
        max_steps=20,
        accumulate_grad_batches=2,
    )
    assert len(task.losses) == 6  # batches 4 and 5 belong to step 3
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == 3
    assert (stop.stopped_by, stop.stopped_at, stop.exit_code) == (number, 3, code)


def test_no_validation_is_run_on_the_way_out(tmp_path):
    validations = CountValidations()
    stop = SaveOnSignal()
    options = {"max_steps": 6, "limit_val_batches": 1, "val_check_interval": 3}
    trainer = tiny_trainer(tmp_path, stop, validations, SendAt(1, signal.SIGTERM), **options)
    trainer.fit(TinyTask(), datamodule=TinyData())
    assert validations.count == 0
    assert trainer.limit_val_batches == 1


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    stop = SaveOnSignal()
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            tiny_fit(tmp_path, stop, SendAt(1, signal.SIGINT, signal.SIGINT), max_steps=50)
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning leaves it ignored
    assert stop.stopped_by == signal.SIGINT
    assert stop.exit_code == 130
    assert not (tmp_path / "last.ckpt").exists()


@pytest.mark.parametrize(
    ("saved", "line"),
    [(True, "the last checkpoint is an earlier one"), (False, "no checkpoint was saved")],
)
def test_a_second_ctrl_c_says_whether_there_is_a_checkpoint(tmp_path, saved, line):
    before = signal.getsignal(signal.SIGINT)
    last = SaveLast(tmp_path, every_n_steps=2 if saved else 20)
    twice = SendAt(3, signal.SIGINT, signal.SIGINT)
    try:
        with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
            tiny_fit(tmp_path, SaveOnSignal(), last, twice, max_steps=50)
    finally:
        signal.signal(signal.SIGINT, before)
    assert any(str(error).endswith(line) for error in causes(ended.value))
    assert (tmp_path / "last.ckpt").exists() == saved


def test_a_hangup_ends_a_step_as_sigterm_does(tmp_path):
    stop = SaveOnSignal()
    tiny_fit(tmp_path, stop, SaveLast(tmp_path), SendAt(2, signal.SIGHUP), max_steps=20)
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == 3
    assert (stop.stopped_by, stop.exit_code) == (signal.SIGHUP, 129)


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT"])  # ignored under nohup, after a script's &
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(tmp_path, name):
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        tiny_fit(tmp_path, stop := SaveOnSignal(), SendAt(2, number), max_steps=5)
        assert stop.stopped_by is None
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_time_limit_does_not_follow_the_machines_clock(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 2e12)  # some day far ahead
    stop = SaveOnSignal(until=time.monotonic() + 3600)
    tiny_fit(tmp_path, stop, max_steps=3)
    assert not stop.out_of_time
    tiny_fit(tmp_path, late := SaveOnSignal(until=time.monotonic()), max_steps=3)
    assert late.out_of_time
