"""recipe=hf-long: each case in processes of its own, on a CPU by gloo; what fails, hangs or does not fit is a row."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from flashtrain.command.compose import compose_settings
from flashtrain.command.job import run_job
from flashtrain.report import read_result
from flashtrain.tasks.batching import choose_batching
from flashtrain.training.hardware import Hardware, detect_hardware
from flashtrain.training.optimizers import Lamb, MasterWeights
from flashtrain_recipes.huggingface_benchmark import long_steps
from flashtrain_recipes.huggingface_benchmark.long_steps import LongSteps

pytestmark = pytest.mark.integration  # whole runs and plans

pytest.importorskip("transformers")
pytest.importorskip("peft")
POPEN = subprocess.Popen
RESULTS = Path(__file__).parents[3] / "recipes" / "results"
WORDS = ("recipe=hf-long", "hardware=cpu", "logger=none", "benchmark.contexts=[64]", "benchmark.steps=2")
H200 = Hardware("cuda", "NVIDIA H200", 2, (9, 0), 150 * 10**9, 149 * 10**9, 989e12, "bf16-mixed", "flash", 120 * 2**30)


def rows_of(folder: Path, *words: str) -> list[dict]:
    told = [*WORDS, *words]
    assert run_job(compose_settings(told), folder, overrides=told, started=time.time()) == 0
    return [row for row in read_result(folder / "result.json").rows if row["implementation"] == "flashtrain"]


@pytest.mark.slow  # starts processes
@pytest.mark.parametrize("devices", [(), ("trainer.devices=2", "context_parallel=2")])
def test_a_step_is_measured_on_one_device_and_over_two(devices: tuple[str, ...], tmp_path) -> None:
    (row,) = rows_of(tmp_path, "benchmark.models=[tiny-lora]", "memory=selective", *devices)
    assert row.get("status") is None, row
    assert (row["context"], row["devices"], row["steps"]) == (64, 2 if devices else 1, 2)
    assert row["tokens_per_second"] == pytest.approx(64 / row["step_seconds"], rel=0.2)
    assert row["memory"] == "selective checkpointing"
    assert row["memory_estimate_gib"] > 0
    assert row["compile_seconds"] >= 0


def as_ranks(monkeypatch, program: str) -> None:
    """Lets a case's process run this program, which finds FOLDER and CASE in its arguments."""

    def start(words, **options):
        return POPEN([sys.executable, "-c", program, *words[3:]], **options)

    monkeypatch.setattr(long_steps.subprocess, "Popen", start)


def test_a_rank_that_finds_no_memory_ends_its_model_and_not_the_run(tmp_path, monkeypatch) -> None:
    told = json.dumps({"status": "out of memory", "error": "OutOfMemoryError: CUDA out of memory"})
    as_ranks(monkeypatch, f"import sys, pathlib; pathlib.Path(sys.argv[1], 'case-0.json').write_text({told!r})")
    first, second = rows_of(tmp_path, "benchmark.models=[tiny]", "benchmark.contexts=[64,128]")
    assert first["error"].startswith("OutOfMemoryError")
    assert second["error"] == "not tried: a context of 64 ran out of memory already"
    assert {row["status"] for row in (first, second)} == {"out of memory"}
    assert all(row["memory_estimate_gib"] for row in (first, second))


def test_what_takes_too_long_or_dies_is_a_row(tmp_path, monkeypatch) -> None:
    as_ranks(monkeypatch, "import time; time.sleep(3600)")
    rows = rows_of(tmp_path / "a", "benchmark.models=[tiny,tiny-lora]", "benchmark.max_seconds=2")
    assert [row["status"] for row in rows] == ["no time left"] * 2
    as_ranks(monkeypatch, "import sys; sys.exit(3)")
    (row,) = rows_of(tmp_path / "b")
    assert row["status"] == "failed"
    assert "ended with status 3" in row["error"]


def test_what_a_rank_raises_is_its_row(tmp_path, monkeypatch) -> None:
    def full(*_):
        raise RuntimeError("CUDA error: out of memory")

    ended = []
    monkeypatch.setattr(long_steps, "_measure", full)
    monkeypatch.setattr(long_steps.os, "_exit", ended.append)
    long_steps.main([str(tmp_path), "0"])
    assert ended == [1]
    assert json.loads((tmp_path / "case-0.json").read_text())["status"] == "out of memory"


def long_steps_on(hardware: Hardware, *words: str) -> LongSteps:
    return LongSteps(compose_settings(["recipe=hf-long", "hardware.demo=never", *words]), hardware)


def test_the_plan_of_an_h200_holds_393_216_tokens_of_an_8b_model_with_adapters() -> None:
    job = long_steps_on(H200)
    told = [job.columns(case) for case in job.todo]
    assert [row["context"] for row in told] == [131072, 262144, 393216]
    assert all(row["memory_estimate_gib"] < 0.9 * 140 for row in told)
    assert told[-1]["host_estimate_gib"] == 96.0
    (largest,) = job.plans()
    assert largest["context"] >= 393216
    assert "llama-8b-lora S=131,072: memory" in job.plan()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("hf-long-h200", ()),
        ("hf-long-h100", ()),
        ("hf-long-two-gpus-h200", ("trainer.devices=2", "context_parallel=2")),
    ],
)
def test_estimates_are_at_most_a_tenth_above_the_peaks_and_never_below(name: str, told: tuple[str, ...]) -> None:
    """But for one row, of code that kept pieces of 65,536 tokens beside each other, which is no more."""
    rows = read_result(RESULTS / f"{name}.json").rows
    measured = {(r["model"], r["context"]): r for r in rows if r["peak_memory_gib"] and "by 65,536" not in r["memory"]}
    assert len(measured) >= 5
    savings = ("memory.offload=true", "memory.ffn_chunk=16384", "memory.loss_chunk=2048")
    for (model, context), row in measured.items():
        asked = (f"benchmark.models=[{model}]", f"benchmark.contexts=[{context}]")
        kind = row["memory"].split()[0]  # full, or selective
        job = long_steps_on(replace(H200, host_memory_bytes=250 * 2**30), *told, *savings, f"memory={kind}", *asked)
        estimate = job.columns(job.todo[0])["memory_estimate_gib"]
        assert row["peak_memory_gib"] <= estimate <= 1.1 * row["peak_memory_gib"], (model, context)
        assert estimate == row["memory_estimate_gib"]


def test_the_largest_context_that_memory_auto_takes_is_a_row_of_each_model() -> None:
    job = long_steps_on(H200, "benchmark.models=[llama-1b,llama-8b-lora]", "memory=none")
    rows = job.completed(SimpleNamespace(rows=[]))
    assert [row["model"] for row in rows] == ["llama-1b", "llama-8b-lora"]
    assert {row["implementation"] for row in rows} == {"plan of memory=auto"}
    for row in rows:
        assert row["limited_by"] == "host"
        assert "inputs in host memory" in row["memory"]
        assert row["host_estimate_gib"] <= 0.9 * 120
        assert f"{row['model']} S={row['context']:,} at most by memory=auto" in job.plan()
        (longer,) = long_steps_on(H200, f"benchmark.models=[{row['model']}]", "memory=full", "memory.offload=true",
                                  f"benchmark.contexts=[{row['context'] + 4096}]").todo  # fmt: skip
        assert "GiB into host memory" in job.columns(longer)["error"]


def test_the_largest_context_is_limited_by_the_device_where_that_is_full_first() -> None:
    smaller = replace(H200, total_memory_bytes=80 * 2**30, free_memory_bytes=79 * 2**30)
    (row,) = long_steps_on(smaller, "benchmark.models=[llama-3b]").plans()
    assert (row["limited_by"], row["context"] % 4096) == ("device", 0)
    assert 0.9 * 0.9 * 79 < row["memory_estimate_gib"] <= 0.9 * 79


def test_a_model_that_fits_at_no_context_has_no_largest() -> None:
    assert long_steps_on(replace(H200, free_memory_bytes=20 * 2**30), "benchmark.models=[llama-8b]").plans() == []


def test_nothing_of_the_step_that_compiles_is_left(tmp_path: Path) -> None:
    words = ["recipe=hf-long", "hardware=cpu", "benchmark.models=[tiny]", "benchmark.contexts=[64]"]
    job = LongSteps(compose_settings(words), detect_hardware("cpu"))
    (case,) = job.todo
    model = long_steps._model(case, job.settled)
    batching = choose_batching(case.settings(), job.settled, model)
    before = {id(found) for found in gc.get_objects() if isinstance(found, pl.LightningModule | pl.Trainer)}
    assert long_steps._warm_up(case, job.settled, tmp_path, batching) > 0
    after = [found for found in gc.get_objects() if isinstance(found, pl.LightningModule | pl.Trainer)]
    assert [found for found in after if id(found) not in before] == []


def test_the_figure_has_a_line_for_each_model_up_to_its_largest_context(tmp_path: Path) -> None:
    job = long_steps_on(H200, "benchmark.models=[llama-1b]")
    told = {"model": "llama-1b", "devices": 1, "implementation": "flashtrain", "memory": "none"}
    rows = [{**told, "context": 4096 * n, "peak_memory_gib": 20.0 + n} for n in (1, 2, 20)]
    assert [name for name, _ in job.figures(SimpleNamespace(rows=rows, folder=tmp_path))] == ["memory"]
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    assert not list(job.figures(SimpleNamespace(rows=rows[:1], folder=tmp_path)))


@pytest.mark.parametrize("kind", ["adamw", "a rate that is a tensor", "lamb", "float32 copies"])
def test_a_measured_step_has_the_states_that_every_later_one_has(kind: str) -> None:
    layer = torch.nn.Linear(3, 2)
    layer.bias.requires_grad = False
    if kind == "float32 copies":
        layer.to(torch.bfloat16)
    before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    rate = torch.tensor(0.1) if kind == "a rate that is a tensor" else 0.1  # torchao's
    optimizer = make_optimizer(kind, layer, rate)
    long_steps._make_states(optimizer)
    states = optimizer.state[optimizer.param_groups[0]["params"][0]].values()
    assert sum(torch.is_tensor(state) and state.shape == (2, 3) for state in states) == 2
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
    assert optimizer.param_groups[0]["lr"] is rate or kind != "a rate that is a tensor"
    assert layer.weight.grad is None
    assert all(torch.equal(parameter, before[name]) for name, parameter in layer.named_parameters())


def make_optimizer(kind: str, layer: torch.nn.Linear, rate: Any) -> torch.optim.Optimizer:
    if kind == "lamb":
        return Lamb([layer.weight], lr=rate)
    adamw = torch.optim.AdamW([layer.weight], lr=rate, weight_decay=0.5)
    return MasterWeights(adamw) if kind == "float32 copies" else adamw


def test_the_settings_of_a_training_are_heeded() -> None:
    words = ["recipe=hf-long", "trainer.devices=2", "context_parallel=2", "hardware.precision=bf16-true"]
    job = LongSteps(compose_settings(words), detect_hardware("cpu"))
    assert (job.settled.precision, job.settled.attention) == ("bf16-true", "flash")
    assert job.todo[0].settings().strategy == "context"
