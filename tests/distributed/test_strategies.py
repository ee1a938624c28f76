"""Strategies by name; and two gloo ranks train as one process does, under ddp and fsdp."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import of_ranks
from tiny_training import TinyData, TinyTask, tiny_trainer

from flashtrain.training.checkpoints import AtomicCheckpointIO, read_checkpoint, weights_in

pytestmark = pytest.mark.integration


def one_process(
    folder: Path, steps: int, resume: Path | None = None, accumulate: int = 1
) -> TinyTask:
    """The same global batches of 8 samples on one device."""
    task = TinyTask()
    options = {
        "max_steps": steps,
        "plugins": [AtomicCheckpointIO()],
        "accumulate_grad_batches": accumulate,
    }
    trainer = tiny_trainer(folder, **options)
    trainer.fit(task, datamodule=TinyData(batch_size=8), ckpt_path=resume)
    return task


def mean_of(ranks: list[dict], key: str) -> list[float]:
    return [(one + other) / 2 for one, other in zip(ranks[0][key], ranks[1][key], strict=True)]


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def trained(request, two_ranks):
    folder = two_ranks / request.param
    return folder, of_ranks(folder, 2)


def test_two_ranks_have_the_losses_of_one_process(trained, tmp_path):
    _, ranks = trained
    expected = one_process(tmp_path, 6).losses
    assert mean_of(ranks, "losses") == pytest.approx(expected, rel=1e-5)


def test_accumulated_steps_have_the_losses_of_one_process(trained, tmp_path):
    _, ranks = trained
    expected = one_process(tmp_path, 3, accumulate=2).losses
    assert mean_of(ranks, "accumulated") == pytest.approx(expected, rel=1e-5)


def test_best_and_last_checkpoints_are_single_whole_files(trained):
    folder, _ = trained
    assert sorted(path.name for path in (folder / "whole").iterdir()) == ["best.ckpt", "last.ckpt"]


def test_the_gathered_weights_are_whole_on_the_first_rank_and_equal_the_checkpoints(trained):
    folder, ranks = trained
    gathered = torch.load(folder / "weights.pt", weights_only=True)
    last = folder / "whole" / "last.ckpt"
    saved = weights_in(read_checkpoint(last), last)
    assert ranks[0]["gathered"] == sorted(saved)
    assert all(torch.equal(gathered[name], saved[name]) for name in saved)


def test_ranks_agree_on_where_to_stop(two_ranks, tmp_path):
    ranks = of_ranks(two_ranks / "stopping", 2)
    # SIGTERM reached the second rank only, in the middle of its third step.
    assert ranks[0]["stopped_at"] == ranks[1]["stopped_at"] >= 3
    assert [rank["exit_code"] for rank in ranks] == [143, 143]
    assert all(rank["handlers_restored"] for rank in ranks)
    # Stopped and resumed, they go on as one process does.
    expected = one_process(tmp_path, ranks[0]["stopped_at"] + 2, accumulate=2).losses
    assert mean_of(ranks, "losses") == pytest.approx(expected, rel=1e-4)
    # A loss that became NaN on the second rank ends both with the same line.
    assert [rank["message"].split(";")[0] for rank in ranks] == ["loss became nan at step 3"] * 2


def test_sharded_experts_are_muons_as_whole_ones_are(two_ranks):
    for found in of_ranks(two_ranks / "experts", 2):
        for whole, sharded in found.values():
            for ours, exact in zip(sharded, whole, strict=True):
                # Three updates of about 0.01, rounded to bfloat16.
                assert ours == pytest.approx(exact, abs=4e-3)
