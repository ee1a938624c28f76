"""Whole runs of the recipes that measure training steps, tiny, on a CPU."""

from __future__ import annotations

import json
import subprocess
import time

import pytest
from jobs import run_job

from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import write_summary
from flashtrain.report.rows import read_result
from flashtrain.run.machine import adapt_to_machine
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.settings import Settings
from flashtrain.training.metrics_file import MetricsFile
from flashtrain_recipes.step_benchmark import command_cost
from flashtrain_recipes.step_benchmark import run as steps_run
from flashtrain_recipes.step_benchmark.hybrids import HybridCase

pytestmark = pytest.mark.integration  # whole runs

TINY = ("hardware=cpu", "logger=csv", "benchmark.rounds=1", "benchmark.steps=1")
SPEED = ("recipe=gpt2-speed", *TINY, "benchmark.contexts=[16]", "benchmark.batches=[1,2]")
CONTEXT = ("recipe=context-speed", *TINY, "benchmark.contexts=[16,32,64]", "benchmark.tokens=32")


def run(folder, *words: str) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    return run_job(
        compose_settings(list(words)), folder, overrides=list(words), started=time.monotonic()
    )


def settled(*words: str) -> Settings:
    return adapt_to_machine(compose_settings(list(words)), CommandLine(words))[0]


@pytest.fixture(scope="module")
def speed(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("speed") / "run"
    assert run(folder, *SPEED) == 0
    return folder


def test_gpt2_speed_measures_every_implementation_at_every_batch(speed) -> None:
    pytest.importorskip("transformers")
    result = read_result(speed / "result.json")
    measured = {
        (row["implementation"], row["batch"]) for row in result.rows if row.get("tokens_per_second")
    }
    names = {"flashtrain", "plain PyTorch, SDPA", "plain PyTorch, standard attention",
             "Hugging Face, eager",
             "Hugging Face, SDPA"}  # fmt: skip
    assert measured == {(name, batch) for name in names for batch in (1, 2)}
    (absent,) = [row for row in result.rows if not row.get("tokens_per_second")]
    assert absent["implementation"] == "Hugging Face, SDPA, compiled"
    assert absent["error"] == "is compiled, on a CPU only with benchmark.compile=true"
    assert result.command.startswith("python -m flashtrain recipe=gpt2-speed")


def test_its_summary_is_flat_and_reports_how_many_cases_were_measured(speed) -> None:
    row = json.loads((speed / "summary.json").read_text())
    assert not any(isinstance(value, (dict, list)) for value in row.values())
    assert (row["status"], row["recipe"], row["cases"], row["cases_measured"]) == (
        "finished",
        "gpt2-speed",
        2,
        2,
    )


def test_context_speed_keeps_the_tokens_of_a_step_until_one_sequence_is_longer(tmp_path) -> None:
    assert run(tmp_path / "run", *CONTEXT) == 0
    rows = read_result(tmp_path / "run" / "result.json").rows
    assert {(row["context"], row["batch"]) for row in rows} == {(16, 2), (32, 1), (64, 1)}
    assert len(rows) == 3 * 3
    assert (tmp_path / "run" / "context.png").stat().st_size > 10_000


def test_hybrid_benchmark_measures_each_pattern_and_compares_it_with_exact_attention(tmp_path):
    words = ["recipe=hybrid-benchmark", *TINY, "benchmark.contexts=[16,32]", "benchmark.tokens=32"]
    assert run(tmp_path / "run", *words, "benchmark.patterns=[full,gla+full]") == 0
    rows = read_result(tmp_path / "run" / "result.json").rows
    each = [("full", 16, 2), ("gla+full", 16, 2), ("full", 32, 1), ("gla+full", 32, 1)]
    assert [(row["pattern"], row["context"], row["batch"]) for row in rows] == each
    for exact, hybrid in (rows[:2], rows[2:]):
        ratio = hybrid["tokens_per_second"] / exact["tokens_per_second"]
        assert hybrid["over_exact"] == pytest.approx(ratio, abs=1e-3)
        assert exact["over_exact"] == 1
        assert "paper_speedup" not in exact
    assert (tmp_path / "run" / "context.png").stat().st_size > 10_000


def test_a_hybrids_flops_are_its_own_layers() -> None:
    sizes = {"model": "demo", "context": 4096, "batch": 1, "weights": "fp32", "vocab_size": 257}
    sizes["layers"] = 6
    exact, hybrid = (HybridCase(**sizes, pattern=one) for one in ("full", "gla+full"))
    kinds = [layer.mixer.kind for layer in hybrid.config().layers]
    assert kinds == ["gla", "attention"] * 3
    assert hybrid.flops_per_token() < exact.flops_per_token()
    assert exact.kind != hybrid.kind  # memory of one says nothing of the other


@pytest.mark.longest
def test_the_commands_cost_is_measured_beside_the_bare_loop(tmp_path, monkeypatch) -> None:
    asked = []

    def command(words, **_):
        asked.extend(words)
        folder = tmp_path / "run" / "command"
        folder.mkdir()
        write_summary(folder, {"status": "finished", "peak_memory_gib": 1.0})
        metrics = MetricsFile(folder / "metrics.jsonl")
        for step, seconds in ((9, 100.0), (19, 2.0), (29, 4.0)):  # the first time holds compilation
            metrics.log_metrics({"step_seconds": seconds}, step)
        metrics.finalize("success")

    monkeypatch.setattr(command_cost.subprocess, "run", command)
    words = [
        *SPEED,
        "benchmark.implementations=[flashtrain]",
        "benchmark.command_steps=30",
        "optimizer.epsilon=1e-7",
    ]
    words.append("data.tokenizer=bytes")
    assert run(tmp_path / "run", *words) == 0
    (row,) = [
        row for row in read_result(tmp_path / "run" / "result.json").rows if "command_cost" in row
    ]
    assert row["implementation"] == "flashtrain, the whole command"
    assert row["milliseconds"] == 3000.0
    assert row["command_cost"] == pytest.approx(
        100 * (3000 / row["bare_milliseconds"] - 1), rel=1e-3
    )
    words = asked[next(place for place, word in enumerate(asked) if word.startswith("recipe=")) :]
    # A setting given twice is refused.
    assert len({word.partition("=")[0] for word in words}) == len(words)
    told = compose_settings([word for word in words if not word.startswith("hydra")])
    best = row["batch"]
    assert (told.recipe, told.mode, told.model.size, told.context) == ("gpt2", "train", "demo", 16)
    assert (told.trainer.micro_batch, told.trainer.tokens_per_step, told.trainer.steps) == (
        best,
        best * 16,
        30,
    )
    assert (told.data.tokenizer, told.logger.name, told.optimizer.epsilon) == ("bytes", "csv", 1e-7)


def test_a_command_that_fails_or_takes_too_long_is_a_row_that_reports_it(
    tmp_path, monkeypatch
) -> None:
    def command(words, timeout, **_):
        raise subprocess.TimeoutExpired(words, timeout)

    monkeypatch.setattr(command_cost.subprocess, "run", command)
    words = [
        "benchmark.implementations=[flashtrain]",
        "benchmark.command_steps=20",
        "benchmark.max_seconds=100",
    ]
    assert run(tmp_path / "run", *SPEED, *words) == 0
    (row,) = [
        row
        for row in read_result(tmp_path / "run" / "result.json").rows
        if "command" in row["implementation"]
    ]
    assert row["status"] == "no time left"


def test_another_family_of_models_is_refused() -> None:
    settings = settled("recipe=gpt2-speed", "model=llama", "hardware.demo=never")
    with pytest.raises(UserError, match="model=llama: expected model=gpt2"):
        steps_run.cases(settings)
