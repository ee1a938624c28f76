"""A whole benchmark on a CPU: what it leaves, how it ends early, and how its rows are published."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tiny_runs import checkout_environment

from flashtrain.command.compose import compose_settings
from flashtrain.command.job import run_job, settle
from flashtrain.report import read_result
from flashtrain_recipes.attention_benchmark import measure as benchmark_run
from flashtrain_recipes.attention_benchmark.spec import Benchmark

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
    return run_job(compose_settings(all_words), folder, overrides=all_words, started=time.time())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("benchmark") / "run"
    assert run(folder) == 0
    return folder


def test_a_run_leaves_its_rows_notes_figures_and_a_flat_summary(finished) -> None:
    assert {"config.yaml", "summary.json", "metrics.jsonl", "result.json", "notes.txt", "runtime.png"} <= {
        path.name for path in finished.iterdir()
    }
    row = json.loads((finished / "summary.json").read_text())
    assert not any(isinstance(value, (dict, list)) for value in row.values())
    assert (row["status"], row["recipe"], row["cases"], row["cases_measured"]) == (
        "finished", "attention-benchmark", 4, 4
    )  # fmt: skip
    assert row["rows"] == 4 * 3 * 2
    assert row["tflops_forward"] > 0
    assert "model" not in row  # nothing was trained
    assert "torch SDPA, cuDNN: needs an NVIDIA GPU [every row]" in (finished / "notes.txt").read_text()


def test_the_result_has_the_form_of_recipes_results(finished) -> None:
    result = read_result(finished / "result.json")
    assert result.recipe == "attention-benchmark"
    assert result.command.startswith("python -m flashtrain recipe=attention-benchmark hardware=cpu 'benchmark.seqlens=")
    assert "logger" not in result.command
    assert {row["implementation"] for row in result.rows} == {
        "flashtrain", "torch SDPA, flash", "standard attention"
    }  # fmt: skip
    assert all(row["error"] < 1e-5 for row in result.rows)


def test_when_the_time_is_over_the_rest_is_noted_and_the_run_is_finished(tmp_path, monkeypatch) -> None:
    measured = []
    real = time.monotonic

    class Slow:
        def __init__(self, case, *_, **__) -> None:
            self.case = case

        def run(self, *_, **__):
            measured.append(self.case)
            monkeypatch.setattr(time, "monotonic", lambda: real() + 1000)
            return []

    monkeypatch.setattr(benchmark_run, "Measurement", Slow)
    assert run(tmp_path / "run", "benchmark.max_seconds=900") == 0
    assert len(measured) == 1
    notes = (tmp_path / "run" / "notes.txt").read_text()
    assert "not measured: benchmark.max_seconds=900 were over [B=1 H=2 S=64 D=64 full; " in notes
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["cases_measured"] == 1


def test_a_run_stopped_by_a_signal_keeps_its_rows_and_says_so(tmp_path, monkeypatch) -> None:
    real = benchmark_run.Measurement

    class StopsAtTheSecond(real):
        def run(self, *given, **options):
            if self.case.seqlen_q == 64:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().run(*given, **options)

    monkeypatch.setattr(benchmark_run, "Measurement", StopsAtTheSecond)
    assert run(tmp_path / "run") == 143
    row = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert row["status"] == "stopped"
    assert {row["seqlen_q"] for row in read_result(tmp_path / "run" / "result.json").rows} == {32}


def test_a_killed_run_has_lost_nothing(tmp_path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal, flashtrain_recipes.attention_benchmark.measure as run\n"
        "class Killed(run.Measurement):\n"
        "    def run(self, *given, **options):\n"
        "        if self.case.seqlen_q == 64: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return super().run(*given, **options)\n"
        "run.Measurement = Killed\n"
        "import flashtrain\n"
        "flashtrain.main()\n"
    )
    command = [sys.executable, str(script), *WORDS, f"output={tmp_path}"]
    assert subprocess.run(command, env=checkout_environment(), capture_output=True).returncode == -signal.SIGKILL
    (result,) = tmp_path.glob("attention-benchmark/*/result.json")
    assert len(read_result(result).rows) == 6


def test_inputs_that_do_not_fit_are_noted_and_the_rest_goes_on(tmp_path, monkeypatch) -> None:
    import torch

    real = benchmark_run.Measurement

    def measurement(case, *given, **options):
        if case.seqlen_q == 64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(case, *given, **options)

    monkeypatch.setattr(benchmark_run, "Measurement", measurement)
    assert run(tmp_path / "run") == 0
    assert "the inputs: out of memory" in (tmp_path / "run" / "notes.txt").read_text()
    assert len(read_result(tmp_path / "run" / "result.json").rows) == 12


def test_plan_lists_the_cases_and_starts_nothing(tmp_path) -> None:
    words = [*WORDS, "mode=plan", f"output={tmp_path}"]
    text = Benchmark().plan(*settle(compose_settings(words), words))
    assert "4 cases (benchmark.rows=grid)" in text
    assert "B=1 H=2 S=64 D=64 causal" in text
    assert "left out: torch SDPA, cuDNN, needs an NVIDIA GPU" in text
    assert not list(tmp_path.glob("attention-benchmark"))


def test_weights_and_biases_gets_the_table_and_the_figures(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert run(tmp_path / "run", "logger=wandb", "benchmark.masks=[causal]") == 0
    media = {path.suffix for path in (tmp_path / "run" / "wandb").rglob("media/**/*") if path.is_file()}
    assert {".png", ".json"} <= media
