"""Three gloo ranks share out masked samples: as costly for each, none twice, and as one process would train."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from masked_ranks import COST, fit

ROOT = Path(__file__).parents[2]
RANKS = 3


def run_ranks(folder: Path) -> list[list[dict]]:
    """Run masked_ranks.py once a rank, as torchrun would; what each wrote of both parts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "recipes"), str(ROOT / "kernels")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
    }
    script = str(Path(__file__).with_name("masked_ranks.py"))
    command = [sys.executable, script, str(folder)]
    ranks = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n\n".join(outputs)[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[list[dict]]:
    return run_ranks(tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def begun(ranks) -> list[dict]:
    """The first two steps of each rank."""
    return [parts[0] for parts in ranks]


@pytest.fixture
def resumed(ranks) -> list[dict]:
    """The next two."""
    return [parts[1] for parts in ranks]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    """The same steps in one process, a rank's row a micro-batch."""
    return fit(tmp_path_factory.mktemp("alone"), steps=4, resume=None, devices=1, accumulate=RANKS)


def test_every_step_costs_each_rank_the_same(begun):
    costs = np.array([[COST.of(np.array(row)).sum() for row in rank["lengths"]] for rank in begun])
    assert costs.shape == (RANKS, 2)
    assert (costs.max(0) / costs.mean(0)).max() < 1.05
    fill = np.mean([sum(row) for rank in begun for row in rank["lengths"]]) / 2048
    assert fill > 0.97  # tiny rows: a fifth of the tail's longest sequence is half a percent


def test_no_sample_is_read_twice_and_all_ranks_stand_at_one_place(begun):
    numbers = [number for rank in begun for row in rank["rows"] for number in row]
    assert len(set(numbers)) == len(numbers)
    states = [rank["state"] for rank in begun]
    assert states[0] == states[1] == states[2]
    assert states[0]["next_number"] - len(states[0]["waiting"]) == len(numbers)


def test_the_ranks_train_as_one_process_that_reads_all_their_rows(begun, alone):
    together = [row for step in zip(*(rank["rows"] for rank in begun), strict=True) for row in step]
    assert together == [list(row) for row in alone["rows"][: 2 * RANKS]]
    for rank in begun:
        assert rank["losses"] == pytest.approx(alone["losses"][:2], rel=1e-5)


def test_resumed_ranks_go_on_exactly(resumed, alone):
    together = [row for step in zip(*(rank["rows"] for rank in resumed), strict=True) for row in step]
    assert together == [list(row) for row in alone["rows"][2 * RANKS :]]
    for rank in resumed:
        assert rank["losses"] == pytest.approx(alone["losses"][2:], rel=1e-5)
        assert rank["accuracy"] == pytest.approx(alone["accuracy"], abs=2e-3)
