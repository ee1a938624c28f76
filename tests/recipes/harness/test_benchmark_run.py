"""A whole benchmark (attention's) on a CPU: what it leaves, how it ends early, and how
its rows are published."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
from jobs import run_job
from tiny_runs import checkout_environment

from flashtrain.command.compose import compose_settings
from flashtrain.report.rows import read_result
from flashtrain.run.machine import adapt_to_machine
from flashtrain.settings.command_line import CommandLine
from flashtrain_recipes.attention_benchmark.turns import AttentionTurns
from flashtrain_recipes.harness.spec import Benchmark

pytestmark = pytest.mark.integration  # whole runs

WORDS = (
    "recipe=attention-benchmark",
    "hardware=cpu",
    "logger=csv",
    "benchmark.seqlens=[32,64]",
    "benchmark.heads=2",
    "benchmark.rounds=3",
    "benchmark.implementations=[flashtrain,sdpa-flash,sdpa-cudnn,standard]",
)


def run(folder, *words: str) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    all_words = [*WORDS, *words]
    return run_job(
        compose_settings(all_words), folder, overrides=all_words, started=time.monotonic()
    )


def before_length(monkeypatch: pytest.MonkeyPatch, length: int, do: Callable[[], object]) -> None:
    """Do something when a case of this length begins."""
    begin = AttentionTurns.begin

    def begin_after(self: AttentionTurns) -> None:
        if self.case.seqlen_q == length:
            do()
        begin(self)

    monkeypatch.setattr(AttentionTurns, "begin", begin_after)


def test_a_run_leaves_its_rows_notes_figures_and_a_flat_summary(tmp_path) -> None:
    assert run(tmp_path) == 0
    left = {"config.yaml", "summary.json", "result.json", "notes.txt", "lengths.png"}
    assert left <= {path.name for path in tmp_path.iterdir()}
    row = json.loads((tmp_path / "summary.json").read_text())
    assert not any(isinstance(value, (dict, list)) for value in row.values())
    assert (row["status"], row["recipe"], row["cases"], row["cases_measured"]) == (
        "finished", "attention-benchmark", 4, 4
    )  # fmt: skip
    assert row["rows"] == 4 * 3 * 2
    assert "model" not in row  # nothing was trained
    assert (
        "torch SDPA, cuDNN: needs an NVIDIA GPU [every case]"
        in (tmp_path / "notes.txt").read_text()
    )
    result = read_result(tmp_path / "result.json")
    assert result.recipe == "attention-benchmark"
    assert result.command.startswith(
        "python -m flashtrain recipe=attention-benchmark hardware=cpu 'benchmark.seqlens="
    )
    assert "logger" not in result.command
    assert {row["implementation"] for row in result.rows} == {
        "flashtrain", "torch SDPA, flash", "standard attention"
    }  # fmt: skip
    assert all(row["error"] < 1e-5 for row in result.rows)


def test_when_the_time_is_over_each_case_left_is_rows_that_report_it_and_the_run_is_finished(
    tmp_path, monkeypatch
) -> None:
    real = time.monotonic
    before_length(
        monkeypatch, 64, lambda: monkeypatch.setattr(time, "monotonic", lambda: real() + 1000)
    )
    assert run(tmp_path, "benchmark.max_seconds=900") == 0
    rows = read_result(tmp_path / "result.json").rows
    assert {(row["seqlen_q"], row["mask"]) for row in rows if row["milliseconds"]} == {(32, "full")}
    assert len([row for row in rows if row.get("status") == "no time left"]) == 3 * 3 * 2
    notes = (tmp_path / "notes.txt").read_text()
    assert re.search(
        r"not measured: .*benchmark\.max_seconds=900.* \[B=1 H=2 S=32 D=64 causal; ", notes
    )
    assert json.loads((tmp_path / "summary.json").read_text())["cases_measured"] == 2


def test_a_run_stopped_by_a_signal_keeps_its_rows_and_reports_it(tmp_path, monkeypatch) -> None:
    before_length(monkeypatch, 64, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run(tmp_path) == 143
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "stopped"
    assert {row["seqlen_q"] for row in read_result(tmp_path / "result.json").rows} == {32}


def test_a_killed_run_has_lost_nothing(tmp_path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal\n"
        "from flashtrain_recipes.attention_benchmark.turns import AttentionTurns as Turns\n"
        "begin = Turns.begin\n"
        "def killed(self):\n"
        "    if self.case.seqlen_q == 64: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    begin(self)\n"
        "Turns.begin = killed\n"
        "import flashtrain\n"
        "flashtrain.main()\n"
    )
    command = [sys.executable, str(script), *WORDS, f"output={tmp_path}"]
    assert (
        subprocess.run(command, env=checkout_environment(), capture_output=True).returncode
        == -signal.SIGKILL
    )
    (result,) = tmp_path.glob("attention-benchmark/*/result.json")
    assert len(read_result(result).rows) == 6


def test_inputs_that_do_not_fit_are_rows_and_the_rest_goes_on(tmp_path, monkeypatch) -> None:
    def fill() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    before_length(monkeypatch, 64, fill)
    assert run(tmp_path) == 0
    assert "the inputs: out of memory" in (tmp_path / "notes.txt").read_text()
    rows = read_result(tmp_path / "result.json").rows
    assert {(row["seqlen_q"], row.get("status")) for row in rows} == {
        (32, None),
        (64, "out of memory"),
    }


def test_a_broken_gpu_ends_the_run_which_keeps_its_rows(tmp_path, monkeypatch) -> None:
    def break_down() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    before_length(monkeypatch, 64, break_down)
    assert run(tmp_path) == 1
    assert "illegal memory access" in json.loads((tmp_path / "summary.json").read_text())["error"]
    assert {row["seqlen_q"] for row in read_result(tmp_path / "result.json").rows} == {32}


def test_plan_lists_the_cases_and_starts_nothing(tmp_path) -> None:
    words = [*WORDS, "mode=plan", f"output={tmp_path}"]
    text = Benchmark().plan(*adapt_to_machine(compose_settings(words), CommandLine(words)))
    assert "4 cases" in text
    assert "B=1 H=2 S=64 D=64 causal" in text
    assert "left out: torch SDPA, cuDNN, needs an NVIDIA GPU" in text
    assert not list(tmp_path.glob("attention-benchmark"))


def test_weights_and_biases_gets_the_table_and_the_figures(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert run(tmp_path / "run", "logger=wandb", "benchmark.masks=[causal]") == 0
    media = {
        path.suffix for path in (tmp_path / "run" / "wandb").rglob("media/**/*") if path.is_file()
    }
    assert {".png", ".json"} <= media
