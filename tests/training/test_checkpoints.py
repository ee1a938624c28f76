"""Checkpoints: what is written when, whole or not at all, read without running
code, resumed exactly."""

from __future__ import annotations

import os
import pickle
import random
import sys
import zipfile

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from tiny_training import TinyData, TinyTask, tiny_fit, tiny_trainer

from flashtrain.errors import UserError
from flashtrain.training.checkpoint_callbacks import SaveLast, checkpoint_callbacks, keep_if_best
from flashtrain.training.checkpoints import (
    AtomicCheckpointIO,
    read_checkpoint,
    save_atomically,
    weights_in,
)
from flashtrain.training.early_stopping import StopOnNonFinite
from flashtrain.training.random_state import RandomState
from flashtrain.training.validation import DueValidation


def test_a_run_leaves_best_and_last_and_a_second_one_writes_the_same_names(tmp_path):
    for _ in range(2):
        callbacks = checkpoint_callbacks(tmp_path, every_n_steps=2)
        tiny_fit(tmp_path, *callbacks, max_steps=5, limit_val_batches=1, val_check_interval=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.ckpt", "last.ckpt"]
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == 5
    best = read_checkpoint(tmp_path / "best.ckpt")
    assert best["global_step"] == 3
    assert not {"optimizer_states", "lr_schedulers"} & best.keys()
    assert callbacks[0].best_model_path == str(tmp_path / "best.ckpt")


class Told(TinyTask):
    """Its validations are of these losses, one after the other."""

    def __init__(self, *losses: float) -> None:
        super().__init__()
        self.told = iter(losses)

    def validation_step(self, batch, batch_idx):
        self.log("validation_loss", torch.tensor(next(self.told)))


def test_a_longer_run_compares_with_the_validation_that_followed_the_fit(tmp_path):
    options = {"limit_val_batches": 1, "val_check_interval": 3, "plugins": [AtomicCheckpointIO()]}
    trainer = tiny_trainer(tmp_path, *checkpoint_callbacks(tmp_path), max_steps=5, **options)
    task, data = Told(0.9, 0.3), TinyData()
    trainer.fit(task, datamodule=data)
    trainer.validate(task, datamodule=data, verbose=False)
    keep_if_best(trainer)
    best = tmp_path / "best.ckpt"
    assert read_checkpoint(best)["global_step"] == 5

    last = str(tmp_path / "last.ckpt")
    tiny_fit(
        tmp_path,
        *checkpoint_callbacks(tmp_path),
        task=Told(0.5, 0.5),
        resume=last,
        max_steps=7,
        **options,
    )
    assert read_checkpoint(best)["global_step"] == 5
    tiny_fit(
        tmp_path,
        *checkpoint_callbacks(tmp_path),
        task=Told(0.2, 0.4),
        resume=last,
        max_steps=13,
        **options,
    )
    assert read_checkpoint(best)["global_step"] == 9


def test_a_run_that_goes_back_replaces_the_best_of_the_steps_that_it_makes_anew(tmp_path):
    def fit(steps, *losses, resume=None):
        callbacks = checkpoint_callbacks(tmp_path, every_n_steps=2, keep=2)
        options = {"max_steps": steps, "limit_val_batches": 1, "val_check_interval": 2}
        tiny_fit(tmp_path, *callbacks, task=Told(*losses), resume=resume, **options)
        return read_checkpoint(tmp_path / "best.ckpt")["global_step"]

    assert fit(7, 0.9, 0.8, 0.1) == 6
    assert fit(9, 0.7, 0.6, resume=str(tmp_path / "step-4.ckpt")) == 8
    assert fit(9, 0.9, 0.9, resume=str(tmp_path / "last.ckpt")) == 8


def test_last_is_written_every_n_optimizer_steps(tmp_path):
    written = []

    class Watched(AtomicCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            written.append(checkpoint["global_step"])
            super().save_checkpoint(checkpoint, path, storage_options)

    trainer = tiny_trainer(
        tmp_path, SaveLast(tmp_path, 3), plugins=[Watched()], max_steps=7, accumulate_grad_batches=2
    )
    trainer.fit(TinyTask(), datamodule=TinyData())
    assert written == [3, 6, 7]


def test_earlier_checkpoints_stay_beside_last_and_none_is_written_twice(tmp_path, monkeypatch):
    for links in (True, False):
        folder, written = tmp_path / str(links), []

        class Watched(AtomicCheckpointIO):
            def save_checkpoint(self, checkpoint, path, storage_options=None):
                written.append(checkpoint["global_step"])  # noqa: B023 - of this turn
                super().save_checkpoint(checkpoint, path, storage_options)

        def refused(*_):
            raise OSError

        if not links:
            monkeypatch.setattr(os, "link", refused)
        options = {"plugins": [Watched()], "accumulate_grad_batches": 2}
        whole = tiny_fit(folder, SaveLast(folder, 2, keep=2), max_steps=9, **options)
        assert written == [2, 4, 6, 8, 9]
        steps = {one.name: read_checkpoint(one)["global_step"] for one in folder.iterdir()}
        assert steps == {"last.ckpt": 9, "step-6.ckpt": 6, "step-8.ckpt": 8}
        again = SaveLast(folder, 2, keep=2)
        last = read_checkpoint(folder / "last.ckpt")["state_dict"]
        # Of step 9 is last.ckpt still when step 8 is written.
        tiny_fit(folder, again, resume=folder / "step-6.ckpt", max_steps=9, **options)
        steps = {one.name: read_checkpoint(one)["global_step"] for one in folder.iterdir()}
        assert steps == {"last.ckpt": 9, "step-6.ckpt": 6, "step-8.ckpt": 8}
        anew = read_checkpoint(folder / "last.ckpt")["state_dict"]
        assert all(torch.equal(last[name], anew[name]) for name in last)
        assert len(whole.losses) == 18


class Evil:
    def __reduce__(self):
        return os.system, ("echo run",)


def test_a_checkpoint_that_could_run_code_is_refused(tmp_path):
    torch.save({"state_dict": {}, "callbacks": Evil()}, tmp_path / "evil.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        read_checkpoint(tmp_path / "evil.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "evil.ckpt", weights_only=False)


class Fails(TinyTask):
    """Draws random numbers in every step, and raises at a place of the eighth
    step's second micro-batch."""

    def __init__(self, place: str | None = None) -> None:
        super().__init__()
        self.place = place

    def fail(self, place: str, batch: int = 15) -> None:
        if self.place == place and self.trainer.fit_loop.epoch_loop.batch_idx >= batch:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def training_step(self, batch, batch_idx):
        noise = torch.rand(()) + random.random() + np.random.random()
        self.fail("forward")
        return super().training_step(batch, batch_idx) * noise

    def on_after_backward(self):
        self.fail("backward")

    def optimizer_step(self, *arguments, **named):
        super().optimizer_step(*arguments, **named)
        self.fail("optimizer")

    def on_train_batch_end(self, *_):
        self.fail("end", 13)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        if self.trainer.training:
            self.fail("data", 14)  # the next one's
        return batch


@pytest.mark.parametrize("place", ["forward", "backward", "end", "data"])
def test_an_exception_leaves_the_last_whole_step_from_which_the_run_goes_on_bit_for_bit(
    tmp_path, place
):
    def fit(task: Fails, resume: str | None = None) -> list[float]:
        pl.seed_everything(1, verbose=False)
        callbacks = RandomState(), StopOnNonFinite(), DueValidation(7), SaveLast(tmp_path, 100)
        options = {
            "max_steps": 10,
            "accumulate_grad_batches": 2,
            "limit_val_batches": 1,
            "val_check_interval": 14,
        }
        return tiny_fit(tmp_path, *callbacks, task=task, resume=resume, **options).losses

    whole, failing = fit(Fails()), Fails(place)
    with pytest.raises(torch.OutOfMemoryError):
        fit(failing)
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == 7
    assert failing.losses[:14] + fit(Fails(), str(tmp_path / "last.ckpt")) == whole


def test_an_exception_while_the_optimizer_was_at_work_leaves_the_checkpoint_before(tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        tiny_fit(
            tmp_path,
            SaveLast(tmp_path, 5),
            task=Fails("optimizer"),
            max_steps=10,
            accumulate_grad_batches=2,
        )
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == 5


def test_what_ended_the_fit_is_raised_where_no_checkpoint_can_be_written(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(torch, "save", lambda *_: 1 / 0)
    with pytest.raises(torch.OutOfMemoryError), caplog.at_level("INFO"):
        tiny_fit(tmp_path, SaveLast(tmp_path), task=Fails("forward"), max_steps=20)
    assert "no checkpoint of step 15 was saved: division by zero" in caplog.text


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no file size limit for a process")
def test_a_full_disk_is_one_line_and_the_previous_file_intact(tmp_path):
    import resource

    path, limits = tmp_path / "last.ckpt", resource.getrlimit(resource.RLIMIT_FSIZE)
    save_atomically({"step": 1}, path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(
            UserError,
            match=r"could not write checkpoint .*: File too large; the earlier .* is intact",
        ):
            save_atomically({"step": 2, "w": torch.ones(1_000_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_checkpoint(path) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_the_models_weights_are_read_under_their_own_names():
    state = {"model._orig_mod.w": torch.ones(2), "other.w": torch.zeros(1)}
    assert list(weights_in({"state_dict": state}, "a.ckpt")) == ["w"]
    with pytest.raises(
        UserError, match=r"no weights whose names begin with 'model\.', only bert\.w"
    ):
        weights_in({"state_dict": {"bert.w": torch.ones(2)}}, "a.ckpt")


def flip(path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 64
    path.write_bytes(content)


def test_a_changed_byte_of_a_checkpoint_is_refused_with_the_files_name(tmp_path):
    path = tmp_path / "last.ckpt"
    saved = {"step": 7, "weights": torch.arange(1000.0)}
    save_atomically(saved, path)
    with zipfile.ZipFile(path) as file:
        for part in file.infolist():
            save_atomically(saved, path)
            assert read_checkpoint(path, mmap=True, checked=True)["step"] == 7
            name = path.read_bytes().index(part.filename.encode())
            begin = (
                name
                + len(part.filename)
                + int.from_bytes(path.read_bytes()[name - 2 : name], "little")
            )
            flip(path, begin + part.file_size // 2)
            for options in ({}, {"mmap": True, "checked": True}):
                with pytest.raises(UserError, match=f"{path} is damaged"):
                    read_checkpoint(path, **options)


@pytest.mark.parametrize("content", [b"", b"PK", b"not a checkpoint", b"\x00" * 5000, "cut"])
def test_a_file_that_is_cut_or_no_checkpoint_is_named(tmp_path, content):
    path = tmp_path / "last.ckpt"
    save_atomically({"step": 7}, path)
    path.write_bytes(path.read_bytes()[:-100] if content == "cut" else content)
    for mmap in (False, True):
        with pytest.raises((UserError, pickle.UnpicklingError), match=f"{path}"):
            read_checkpoint(path, mmap=mmap)


@pytest.mark.parametrize("damage", ["cut", "empty", "of another program", "could run code"])
def test_a_damaged_best_checkpoint_is_named_and_a_whole_last_one_resumes(tmp_path, caplog, damage):
    options = {"limit_val_batches": 1, "val_check_interval": 3, "plugins": [AtomicCheckpointIO()]}
    tiny_fit(tmp_path, *checkpoint_callbacks(tmp_path, 4), task=Told(0.9), max_steps=4, **options)
    best, last = tmp_path / "best.ckpt", tmp_path / "last.ckpt"
    if damage == "cut":
        best.write_bytes(best.read_bytes()[:1000])
    elif damage == "empty":
        best.write_bytes(b"")
    elif damage == "of another program":
        torch.save({"weights": torch.ones(2)}, best)
    else:
        torch.save({"callbacks": Evil()}, best)
    with caplog.at_level("INFO"):
        tiny_fit(
            tmp_path,
            *checkpoint_callbacks(tmp_path, 4),
            task=Told(1.5),
            resume=str(last),
            max_steps=7,
            **options,
        )
    assert [line for line in caplog.messages if line.startswith(f"{best} cannot be read")]
    assert read_checkpoint(best)["global_step"] == 6  # a validation makes it anew
    assert read_checkpoint(last)["global_step"] == 7
