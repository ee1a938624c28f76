"""Whole benchmarks over two and four gloo ranks: their rows, and what happens when a rank fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from tiny_runs import checkout_environment, flashtrain_command

from flashtrain.distributed.context.traffic import Sizes, traffic
from flashtrain.report.__main__ import main as report
from flashtrain.report.rows import read_result

pytestmark = pytest.mark.integration  # starts ranks


@pytest.fixture(scope="session")
def runs(tmp_path_factory, worker_id) -> Path:
    """context_runs.py, run by whichever worker of the session comes first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "context-benchmarks"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "codes.json").is_file():
            variables = {
                **checkout_environment(),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            }
            script = Path(__file__).parent / "context_runs.py"
            command = [sys.executable, str(script), str(folder)]
            done = subprocess.run(command, env=variables, capture_output=True, text=True)
            assert (folder / "codes.json").is_file(), done.stdout + done.stderr
    return folder


def status(runs: Path, name: str) -> int:
    return json.loads((runs / "codes.json").read_text())[name]


def printed(runs: Path, name: str) -> str:
    return (runs / f"{name}.out").read_text()


def rows(runs: Path, name: str) -> list[dict]:
    assert status(runs, name) == 0, printed(runs, name)[-4000:]
    return read_result(runs / name / "result.json").rows


def test_every_way_and_layout_has_a_row_at_every_case(runs) -> None:
    found = rows(runs, "grid")
    assert {row["implementation"] for row in found} == {
        "ulysses, balanced",
        *(
            f"{way}, {layout}"
            for way in ("all-gather", "ring")
            for layout in ("balanced", "contiguous")
        ),
        "plain all-gather, zigzag",
        "auto, planned",
    }
    assert {(row["mask"], row["seqlen"]) for row in found} == {
        (mask, length) for mask in ("window-9", "causal-document") for length in (64, 96)
    }
    assert len(found) == 6 * 4 + 2  # without documents nothing is planned
    assert all(
        row["forward_ms"] > 0 and row["backward_ms"] > 0 and row["rounds"] == 1 for row in found
    )


def test_results_and_gradients_are_as_near_to_float64_as_one_devices(runs) -> None:
    for row in rows(runs, "grid"):
        if row["seqlen"] == 64:
            assert row["error"] < 1e-6
            assert row["gradient_error"] < 3e-6
            assert row["error_ratio"] < 4
        else:  # past benchmark.check_longest
            assert "error" not in row


def test_sums_are_right(runs) -> None:
    for row in rows(runs, "grid"):
        took = row["forward_ms"] + row["backward_ms"]
        assert row["efficiency"] == pytest.approx(row["one_device_ms"] / (2 * took), abs=1e-3)
        assert row["communication_share"] == pytest.approx(row["communication_ms"] / took, abs=1e-3)
        assert row["one_device_ms"] == pytest.approx(
            row["one_device_forward_ms"] + row["one_device_backward_ms"], abs=1e-3
        )
    sizes = Sizes(degree=2, heads=4, kv_heads=2, head_dim=16, held=48, bytes_each=4)
    (ring,) = (row for row in rows(runs, "full") if row["way"] == "ring" and row["seqlen"] == 96)
    assert ring["sent_mib"] == pytest.approx(
        traffic(sizes, 1, gathers=False).total / 2**20, abs=1e-3
    )


def test_a_length_that_one_device_does_not_measure_is_computed_from_its_rate_and_marked(
    runs,
) -> None:
    found = [
        row for row in rows(runs, "grid") if row["way"] == "ulysses" and row["mask"] == "window-9"
    ]
    measured, computed = sorted(found, key=lambda row: row["seqlen"])
    assert measured["one_device"] == "measured"
    assert computed["one_device"] == "extrapolated from 64 tokens"
    pairs = [10 * length - 45 for length in (64, 96)]  # ten keys a query, fewer at the beginning
    assert computed["one_device_ms"] == pytest.approx(
        measured["one_device_ms"] * pairs[1] / pairs[0], rel=1e-2
    )


def test_work_is_even_where_the_layout_or_the_way_makes_it_so(runs) -> None:
    documents = [
        row
        for row in rows(runs, "grid")
        if row["mask"] == "causal-document" and row["seqlen"] == 96
    ]
    found = {row["implementation"]: row["imbalance"] for row in documents}
    assert found["ulysses, balanced"] == 1
    assert (
        1 <= found["ring, balanced"] == found["all-gather, balanced"] <= found["ring, contiguous"]
    )
    assert rows(runs, "full")[0]["imbalance"] == 1  # causal, zigzag


def test_the_rows_of_a_run_are_published_as_the_other_benchmarks_are(
    runs, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert {"config.yaml", "summary.json", "result.json", "notes.txt"} <= {
        f.name for f in (runs / "grid").iterdir()
    }
    summary = json.loads((runs / "grid" / "summary.json").read_text())
    assert (summary["status"], summary["cases"], summary["cases_measured"]) == ("finished", 4, 4)
    file = tmp_path / "context.json"
    assert report([str(runs / "grid"), "--save", str(file)]) == 0
    assert (
        report(
            [
                str(file),
                "--columns",
                "seqlen",
                "--pivot",
                "way",
                "--value",
                "efficiency",
                "--markdown",
            ]
        )
        == 0
    )
    assert (
        "| tokens of the sequence | ulysses | all-gather | ring | plain all-gather |"
        in capsys.readouterr().out
    )


def test_each_degree_has_ranks_of_its_own(runs) -> None:
    found = rows(runs, "degrees")
    assert {(row["way"], row["degree"]) for row in found} == {
        ("ring", 2), ("ring", 4), ("hybrid", 4), ("plain all-gather", 2), ("plain all-gather", 4)
    }  # fmt: skip
    assert all(row["error_ratio"] < 4 for row in found)
    assert (
        "hybrid, balanced: hybrid with 6 heads on 2 ranks"
        in (runs / "degrees" / "notes.txt").read_text()
    )


@pytest.mark.parametrize(
    ("name", "status", "error"),
    [
        ("full", "out of memory", None),
        (
            "fails",
            "failed",
            "rank 1 of 2 failed: causal, 64 tokens, 4/2x16, 2 ranks, ring, zigzag: a mistake",
        ),
    ],
)
def test_what_fails_on_one_rank_is_a_row_that_reports_it_and_the_cases_go_on(
    runs, name, status, error
) -> None:
    found = {(row["way"], row["seqlen"]): row for row in rows(runs, name)}
    failed = found.pop(("ring", 64))
    assert (failed["status"], failed.get("error")) == (status, error)
    assert all(row["forward_ms"] > 0 for row in found.values())
    assert len(found) == 3
    assert "in happening" in (runs / name / "case-0.txt").read_text()  # the function


def test_a_rank_that_is_killed_is_named_too(runs) -> None:
    assert status(runs, "dies") == 1
    assert printed(runs, "dies").splitlines()[-1] == (
        "flashtrain: rank 1 of 2 died (SIGKILL) at causal, 64 tokens, 4/2x16, 2 ranks"
    )


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_errors_on_two_gpus_are_at_most_twice_one_gpus(tmp_path) -> None:
    words = (
        "benchmark.seqlens=[4096,8192]",
        "benchmark.shapes=[4/2x64]",
        "benchmark.degrees=[2]",
        "logger=none",
    )
    extra = ("benchmark.masks=[causal,full,causal-document,window-500]", "benchmark.rounds=2")
    command = ("recipe=long-context-benchmark", *words, *extra, f"output={tmp_path}")
    done = flashtrain_command(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("long-context-benchmark/*/result.json")
    found = [
        row for row in read_result(file).rows if row["way"] in ("all-to-all", "all-gather", "ring")
    ]
    assert len(found) == (1 + 3 + 3) * 8
    wrong = [row for row in found if not row["error_ratio"] <= 2]
    assert not wrong, wrong
    assert all(row["peak_memory_gib"] > 0 for row in found)
