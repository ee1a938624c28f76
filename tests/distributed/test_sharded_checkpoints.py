"""Checkpoints in shards: two gloo ranks write them while they train, and any
number goes on from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import of_ranks
from sharded_ranks import TiedTask
from tiny_training import TinyData, tiny_trainer

from flashtrain.training.checkpoints import AtomicCheckpointIO, read_checkpoint, weights_in

pytestmark = pytest.mark.integration  # starts ranks


def one_process(folder: Path, steps: int, resume: Path | None = None) -> list[float]:
    """The losses of the same global batches of 8 samples on one device."""
    task = TiedTask()
    trainer = tiny_trainer(folder, max_steps=steps, plugins=[AtomicCheckpointIO()])
    trainer.fit(task, datamodule=TinyData(batch_size=8), ckpt_path=resume)
    return task.losses


def mean_of(found: list[dict], key: str) -> list[float]:
    return [
        sum(losses) / len(losses) for losses in zip(*(rank[key] for rank in found), strict=True)
    ]


def test_a_run_may_change_between_files_and_folders(sharded_ranks) -> None:
    for rank in of_ranks(sharded_ranks / "two", 2):
        assert rank["folders"] == [False, True, False, True]
        assert rank["switched"] == rank["losses"]
    assert [path.name for path in (sharded_ranks / "two" / "switched").iterdir()] == ["last.ckpt"]


def test_four_ranks_go_on_from_two_and_one_from_four(sharded_ranks, tmp_path) -> None:
    expected = one_process(tmp_path, 10)
    found = of_ranks(sharded_ranks / "four", 4)
    assert mean_of(found, "resumed") == pytest.approx(expected[6:8], rel=1e-4)
    from_four = one_process(tmp_path, 10, resume=sharded_ranks / "four" / "run" / "last.ckpt")
    assert from_four == pytest.approx(expected[8:], rel=1e-4)
    from_two = one_process(tmp_path, 10, resume=sharded_ranks / "two" / "run" / "last.ckpt")
    assert from_two == pytest.approx(expected[6:], rel=1e-4)


def test_last_and_best_are_folders_of_one_whole_checkpoint_each(sharded_ranks) -> None:
    folder = sharded_ranks / "two" / "run"
    assert sorted(path.name for path in folder.iterdir()) == ["best.ckpt", "last.ckpt"]
    for name in ("best.ckpt", "last.ckpt"):
        assert sorted(path.name for path in (folder / name).iterdir()) == ["6-0", "current.json"]
        checkpoint = read_checkpoint(folder / name, mmap=True)
        assert checkpoint["global_step"] == 6
        assert ("optimizer_states" in checkpoint) == (name == "last.ckpt")


def test_its_weights_are_read_whole_tied_ones_under_both_names(sharded_ranks) -> None:
    gathered = torch.load(sharded_ranks / "two" / "weights.pt", weights_only=True)
    last = sharded_ranks / "two" / "run" / "last.ckpt"
    saved = weights_in(read_checkpoint(last), last)
    assert gathered.keys() == saved.keys()
    assert all(torch.equal(gathered[name], saved[name]) for name in saved)
    assert torch.equal(saved["head.weight"], saved["embedding.weight"])


def test_training_goes_on_while_a_checkpoint_of_an_earlier_step_is_written(sharded_ranks) -> None:
    assert [rank["waited"] for rank in of_ranks(sharded_ranks / "going_on", 2)] == [[True], [True]]
    then = torch.load(sharded_ranks / "going_on" / "weights.pt", weights_only=True)
    checkpoint = read_checkpoint(sharded_ranks / "going_on" / "last.ckpt")
    assert checkpoint["global_step"] == 1
    assert all(torch.equal(then[name], checkpoint["state_dict"][f"model.{name}"]) for name in then)


def test_a_full_disk_is_one_line_on_every_rank_and_loses_nothing(sharded_ranks) -> None:
    for rank in of_ranks(sharded_ranks / "full_disk", 2):
        assert rank.keys() == {"part", "current"}
        for name, line in rank.items():
            last = sharded_ranks / "full_disk" / name / "last.ckpt"
            assert line.startswith(
                f"could not write checkpoint {last}: No space left on device; the earlier"
            )
            assert sorted(path.name for path in last.iterdir()) == ["1-0", "current.json"]
            assert read_checkpoint(last)["global_step"] == 1
