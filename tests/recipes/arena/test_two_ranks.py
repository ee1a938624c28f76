"""A curriculum on two processes (DDP, gloo): the same images a step as one
process has, and both stages."""

from __future__ import annotations

import json

import pytest
import torch
from forked_commands import run
from tiny_runs import TinyRuns

from flashtrain.training.checkpoints import read_checkpoint


@pytest.mark.slow  # the command on two processes
def test_two_ranks_train_both_stages_as_one_process_does_and_end_the_first_one_early(
    curriculum: TinyRuns, tmp_path
) -> None:
    stages = (
        "curriculum.stages=[{side:24,steps:9,batch:4,stop_at_accuracy:0.1},{side:28,steps:4,"
        "batch:4,micro_batch:2}]"
    )
    # Masked pixels, turned images and changed drawings are drawn by rank: without
    # them the two must agree.
    plain = (
        "masked_pixels.weight=0",
        "sequence.augment=none",
        "pathfinder.variation=0",
        # Keys' biases have no gradient but rounding's, which Adam would take for one.
        "hardware.precision=64-true",
        stages,
    )
    folder = tmp_path / "two"
    two = ("trainer.devices=2", "trainer.strategy=ddp", f"hydra.run.dir={folder}")
    run(curriculum.settings_words(*plain, *two), tmp_path / "printed", ranks=2)
    status, alone = curriculum.run("alone", *plain)
    assert status == 0
    found, expected = (
        read_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"] for run in (folder, alone)
    )
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=1e-3)
    accuracies = [
        json.loads((run / "summary.json").read_text())["validation_accuracy"]
        for run in (folder, alone)
    ]
    assert accuracies[0] == pytest.approx(accuracies[1])
    rows = map(json.loads, (folder / "learning_curve.jsonl").read_text().splitlines())
    assert [row["images"] for row in rows] == [12, 24, 28]
