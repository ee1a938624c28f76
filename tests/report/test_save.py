from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashtrain.errors import UserError
from flashtrain.report.rows import read_result, write_result
from flashtrain.report.save import join_results, reproducing_command, save_result

VERSIONS = {"torch": "2.13.0", "triton": "3.7.1"}


def sweep_folder(folder: Path, **changes: object) -> Path:
    for number, context in enumerate((1024, 2048)):
        row = {
            "recipe": "gpt2",
            "context": context,
            "train_loss": 3.4,
            "device": "NVIDIA H200",
            "status": "ok",
            "versions": "torch 2.13.0, triton 3.7.1",
            "overrides": f"recipe=gpt2 context={context} +a.rate=1e-3 logger.group=g",
        }
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "summary.json").write_text(
            json.dumps({**row, **changes}), encoding="utf-8"
        )
    return folder


def test_a_sweep_becomes_a_result_with_the_runs_own_device_and_versions(tmp_path: Path):
    save_result(tmp_path / "results" / "gpt2.json", sweep_folder(tmp_path / "sweep"))
    result = read_result(tmp_path / "results" / "gpt2.json")
    assert (result.recipe, result.device, result.versions) == ("gpt2", "NVIDIA H200", VERSIONS)
    assert result.command == "python -m flashtrain -m recipe=gpt2 context=1024,2048 +a.rate=1e-3"
    one_run = [{"recipe": "gpt2", "overrides": "context=8"}]
    assert reproducing_command(one_run) == "python -m flashtrain recipe=gpt2 context=8"
    assert result.rows == [{"context": c, "train_loss": 3.4, "status": "ok"} for c in (1024, 2048)]


def test_runs_of_which_none_finished_are_refused(tmp_path: Path):
    (tmp_path / "sweep" / "0").mkdir(parents=True)
    with pytest.raises(UserError, match="recorded recipe and device"):
        save_result(tmp_path / "r.json", tmp_path / "sweep")


def test_what_was_swept_over_is_in_every_row_even_a_killed_jobs(tmp_path: Path):
    folder = sweep_folder(tmp_path / "sweep")
    (folder / "2").mkdir()
    killed = {
        "status": "failed",
        "error": "killed by signal 9",
        "overrides": "recipe=gpt2 context=4096 +a.rate=3e-3",
    }
    (folder / "2" / "summary.json").write_text(json.dumps(killed), encoding="utf-8")
    rows = save_result(tmp_path / "r.json", folder).rows
    assert [(row["context"], row["a.rate"]) for row in rows] == [
        (1024, 0.001),
        (2048, 0.001),
        (4096, 0.003),
    ]


def measured(folder: Path, context: int, device: str = "NVIDIA H200") -> Path:
    command = f"python -m flashtrain recipe=context-speed 'benchmark.contexts=[{context}]'"
    folder.mkdir()
    write_result(
        folder / "result.json",
        "context-speed",
        command,
        [{"context": context}],
        device,
        {"torch": "2.13.0"},
    )
    return folder


def test_a_benchmark_done_in_parts_becomes_one_result(tmp_path: Path):
    parts = [measured(tmp_path / "a", 1024), measured(tmp_path / "b", 2048)]
    joined = join_results(tmp_path / "joined.json", parts)
    assert [row["context"] for row in joined.rows] == [1024, 2048]
    assert joined.command == (
        "python -m flashtrain recipe=context-speed 'benchmark.contexts=[1024]'; "
        "python -m flashtrain recipe=context-speed 'benchmark.contexts=[2048]'"
    )
    again = join_results(
        tmp_path / "again.json", [tmp_path / "joined.json", measured(tmp_path / "c", 4096)]
    )
    assert len(again.rows) == 3


def test_parts_of_different_devices_are_not_joined(tmp_path: Path):
    parts = [measured(tmp_path / "a", 1024), measured(tmp_path / "b", 2048, device="NVIDIA H100")]
    with pytest.raises(UserError, match="the same device: got NVIDIA H200 and NVIDIA H100"):
        join_results(tmp_path / "joined.json", parts)
    with pytest.raises(FileNotFoundError, match=r"result\.json"):
        join_results(tmp_path / "joined.json", [parts[0], sweep_folder(tmp_path / "sweep")])
