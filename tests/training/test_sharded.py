"""Folders of shards, in one process: killed at each of their writes, and
written by somebody else."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from flashtrain.errors import UserError
from flashtrain.training import sharded
from flashtrain.training.checkpoints import (
    AtomicCheckpointIO,
    checkpoint_exists,
    read_checkpoint,
    save_atomically,
)


def checkpoint(step: int) -> dict:
    return {
        "global_step": step,
        "state_dict": {
            "model.weight": torch.full((3, 4), float(step)),
            "model.scale": torch.tensor(float(step)),
        },
        "optimizer_states": [
            {
                "state": {
                    "model.weight": {
                        "step": torch.tensor(float(step)),
                        "exp_avg": torch.full((3, 4), -1.0 * step),
                    }
                },
                "param_groups": [
                    {"lr": 0.5, "betas": (0.9, 0.95), "params": ["model.weight", "model.scale"]}
                ],
            }
        ],
        "loops": {"fit_loop": {}},
    }


def write(path: Path, step: int) -> None:
    writer = sharded.ShardWriter()
    writer.start(*sharded.split(checkpoint(step)), path, sharded.next_generation(path, step))
    writer.finish()


@pytest.fixture
def last(tmp_path) -> Path:
    write(tmp_path / "last.ckpt", 7)
    return tmp_path / "last.ckpt"


@pytest.fixture
def folder(last) -> Path:
    return last / "7-0"


def test_what_was_written_is_read_back(last) -> None:
    found = read_checkpoint(last, optimizers=True)
    assert torch.equal(found["state_dict"]["model.weight"], torch.full((3, 4), 7.0))
    assert found["state_dict"]["model.scale"] == 7
    # With the numbers that torch's optimizers know their parameters by.
    (optimizer,) = found["optimizer_states"]
    assert optimizer["param_groups"] == [{"lr": 0.5, "betas": (0.9, 0.95), "params": [0, 1]}]
    assert torch.equal(optimizer["state"][0]["exp_avg"], torch.full((3, 4), -7.0))
    assert AtomicCheckpointIO().load_checkpoint(last)["global_step"] == 7


def test_a_part_that_begins_inside_a_storage_is_written_as_any_other(tmp_path) -> None:
    # As transformers reads the second rank's shard of a file on a CPU.
    whole = torch.arange(24.0).view(6, 4)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        saved = {"state_dict": {"weight": DTensor.from_local(whole[3:], mesh, [Shard(0)])}}
        writer = sharded.ShardWriter()
        writer.start(*sharded.split(saved), tmp_path / "last.ckpt", "1-0")
        writer.finish()
    finally:
        dist.destroy_process_group()
    assert torch.equal(read_checkpoint(tmp_path / "last.ckpt")["state_dict"]["weight"], whole[3:])


def test_without_the_optimizers_their_shapes_are_known(last) -> None:
    weights, shapes = read_checkpoint(last), read_checkpoint(last, mmap=True)
    assert not weights["state_dict"]["model.weight"].is_meta
    assert shapes["state_dict"]["model.weight"].is_meta
    for found in (weights, shapes):
        state = found["optimizer_states"][0]["state"]["model.weight"]["exp_avg"]
        assert state.is_meta
        assert state.shape == (3, 4)


def test_weights_of_two_names_are_kept_once_and_those_that_are_not_saved_are_no_matter(
    tmp_path,
) -> None:
    saved = checkpoint(1)
    saved["state_dict"]["model.head"] = saved["state_dict"]["model.weight"]
    tied = {
        "model.head": "model.weight",
        "model.frozen_head": "model.frozen_table",
        "model.scale": "model.frozen",
    }
    plain, tensors = sharded.split(saved, tied)
    assert "state_dict/model.head" not in tensors
    assert "state_dict/model.scale" in tensors
    joined = sharded.joined(plain, tensors)
    assert joined["state_dict"].keys() == saved["state_dict"].keys()
    assert joined["state_dict"]["model.head"] is joined["state_dict"]["model.weight"]


def test_the_next_one_takes_its_place_and_is_alone(last) -> None:
    write(last, 7)
    write(last, 9)
    assert sorted(path.name for path in last.iterdir()) == ["9-0", "current.json"]
    assert read_checkpoint(last)["global_step"] == 9


def test_a_file_takes_a_folders_place_and_a_folder_a_files(last) -> None:
    save_atomically({"global_step": 8}, last)
    assert last.is_file()
    assert read_checkpoint(last) == {"global_step": 8}
    write(last, 9)
    assert read_checkpoint(last)["global_step"] == 9
    assert [path.name for path in last.parent.iterdir()] == ["last.ckpt"]


class Killed(BaseException):
    pass


def test_a_kill_before_or_after_each_write_leaves_a_whole_checkpoint(tmp_path, monkeypatch) -> None:
    """The operations that change what is on the disk, in their order: dies before the
    first, the second, ..."""
    changes: list[str] = []
    dies_at = [10**9]

    def counted(owner, name: str) -> None:
        real = getattr(owner, name)

        def operation(*arguments, **options):
            changes.append(name)
            if len(changes) == dies_at[0]:
                raise Killed
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, operation)

    for owner, name in (
        (os, "fsync"),
        (Path, "replace"),
        (Path, "rename"),
        (Path, "unlink"),
        (shutil, "rmtree"),
    ):
        counted(owner, name)
    last = tmp_path / "last.ckpt"
    write(last, 1)
    changes.clear()
    write(last, 2)
    needed, step = len(changes), 2
    assert needed >= 6
    for dies_at[0] in range(1, needed + 1):
        changes.clear()
        with pytest.raises((Killed, UserError)):  # torch tells of the former in its own words
            write(last, step + 1)
        found = read_checkpoint(last, optimizers=True)
        assert found["global_step"] in (step, step + 1)
        step = found["global_step"]
        assert torch.equal(found["state_dict"]["model.weight"], torch.full((3, 4), float(step)))
        assert found["optimizer_states"][0]["state"][0]["step"] == step
    assert checkpoint_exists(last)


def test_parts_that_the_first_process_does_not_see_are_no_checkpoint(last, monkeypatch) -> None:
    """Another machine has written them to a disk of its own."""
    real = dcp.save

    def saved_elsewhere(*arguments, **options) -> None:
        real(*arguments, **options)
        for file in last.glob("8-0/*.safetensors"):
            file.unlink()

    monkeypatch.setattr(dcp, "save", saved_elsewhere)
    with pytest.raises(UserError, match=r"could not write .*several machines need a shared disk"):
        write(last, 8)
    assert read_checkpoint(last)["global_step"] == 7


def test_what_fails_after_the_new_one_has_taken_its_place_loses_nothing(last, monkeypatch) -> None:
    def fails(folder: Path) -> None:
        if (last / "8-0" / "plain.ckpt").is_file() and sharded.current(last).name == "8-0":
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("flashtrain.files.disk.flush", fails)
    with pytest.raises(UserError, match=r"could not write checkpoint .*Input/output error"):
        write(last, 8)
    assert read_checkpoint(last)["global_step"] == 8


# Written by somebody else


class Bait:
    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self):
        return Path.touch, (self.flag,)


@pytest.mark.parametrize("name", ["plain.ckpt", ".metadata"])
def test_no_file_of_it_is_unpickled(last, folder, tmp_path, name) -> None:
    flag = tmp_path / "ran"
    if name == "plain.ckpt":
        torch.save(
            {**torch.load(folder / name, weights_only=True), "more": Bait(flag)}, folder / name
        )
        with pytest.raises(pickle.UnpicklingError):
            read_checkpoint(last)
    else:  # torch.distributed.checkpoint's own reader unpickles .metadata; nothing here looks at it
        (folder / name).write_bytes(pickle.dumps(Bait(flag)))
        assert read_checkpoint(last)["global_step"] == 7
    assert not flag.exists()


def test_a_folder_of_torchs_own_form_is_refused_unread(tmp_path) -> None:
    last, flag = tmp_path / "last.ckpt", tmp_path / "ran"
    last.mkdir()
    (last / ".metadata").write_bytes(pickle.dumps(Bait(flag)))
    with pytest.raises(UserError, match=r"last.ckpt is a folder, not a checkpoint file"):
        read_checkpoint(last)
    assert not checkpoint_exists(last)
    assert not flag.exists()


def test_current_json_leads_nowhere_else(last) -> None:
    (last / "current.json").write_text(
        json.dumps({"folder": f"../elsewhere/{sharded.current(last).name}"})
    )
    assert sharded.current(last) == last / "7-0"


def test_a_copy_that_lacks_a_shard_is_noticed(last, folder) -> None:
    """torch would leave what it holds as it was in memory."""
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(UserError, match=r"lacks parts of state_dict/model"):
        read_checkpoint(last)
    (folder / "plain.ckpt").unlink()
    assert not checkpoint_exists(last)
