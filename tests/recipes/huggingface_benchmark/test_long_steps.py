"""recipe=hf-long: each case in processes of its own, on a CPU by gloo; what fails, hangs or
does not fit is a row."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jobs import run_job

from flashtrain.command.compose import compose_settings
from flashtrain.report.rows import read_result
from flashtrain.training.hardware import Hardware, detect_hardware, planned_hardware
from flashtrain.training.lamb import Lamb
from flashtrain.training.master_weights import MasterWeights
from flashtrain_recipes.harness import processes
from flashtrain_recipes.huggingface_benchmark import long_steps
from flashtrain_recipes.huggingface_benchmark.long_rank import make_states
from flashtrain_recipes.huggingface_benchmark.long_steps import LongSteps

pytestmark = pytest.mark.integration  # whole runs and plans

pytest.importorskip("transformers")
pytest.importorskip("peft")
RESULTS = Path(__file__).parents[3] / "recipes" / "results"
WORDS = (
    "recipe=hf-long",
    "hardware=cpu",
    "logger=none",
    "benchmark.contexts=[64]",
    "benchmark.steps=2",
)
H200 = Hardware(
    "cuda",
    "NVIDIA H200",
    2,
    (9, 0),
    150 * 10**9,
    149 * 10**9,
    989e12,
    "bf16-mixed",
    "flash",
    120 * 2**30,
)


def rows_of(folder: Path, *words: str) -> list[dict]:
    told = [*WORDS, *words]
    assert run_job(compose_settings(told), folder, overrides=told, started=time.monotonic()) == 0
    return [
        row
        for row in read_result(folder / "result.json").rows
        if row["implementation"] == "flashtrain"
    ]


@pytest.mark.slow  # starts processes
@pytest.mark.parametrize("devices", [(), ("trainer.devices=2", "context_parallel=2")])
def test_a_step_is_measured_on_one_device_and_over_two(devices: tuple[str, ...], tmp_path) -> None:
    (row,) = rows_of(
        tmp_path,
        "benchmark.models=[tiny-lora]",
        "memory.activation_checkpointing=selective",
        *devices,
    )
    assert row.get("status") is None, row
    assert (row["context"], row["devices"], row["steps"]) == (64, 2 if devices else 1, 2)
    assert row["tokens_per_second"] == pytest.approx(64 / row["step_seconds"], rel=0.2)
    assert row["memory"] == "selective checkpointing"
    assert row["memory_estimate_gib"] > 0
    assert row["compile_seconds"] >= 0


def as_ranks(monkeypatch, work: Callable[..., None]) -> None:
    """Lets a case's process do this instead."""
    monkeypatch.setattr(processes, "START_METHOD", "fork")
    monkeypatch.setattr(long_steps, "measure_steps", work)


def test_a_rank_that_finds_no_memory_ends_its_model_and_not_the_run(tmp_path, monkeypatch) -> None:
    def full(*_):
        raise RuntimeError("CUDA error: out of memory")

    as_ranks(monkeypatch, full)
    first, second = rows_of(tmp_path, "benchmark.models=[tiny]", "benchmark.contexts=[64,128]")
    assert "out of memory" in first["error"]
    assert "in full" in (tmp_path / "case-0.txt").read_text()  # the function
    assert second["error"] == "not tried: a context of 64 ran out of memory already"
    assert {row["status"] for row in (first, second)} == {"out of memory"}
    assert all(row["memory_estimate_gib"] for row in (first, second))


def test_what_takes_too_long_or_dies_is_a_row(tmp_path, monkeypatch) -> None:
    as_ranks(monkeypatch, lambda *_: time.sleep(3600))
    rows = rows_of(tmp_path / "a", "benchmark.models=[tiny,tiny-lora]", "benchmark.max_seconds=2")
    assert [row["status"] for row in rows] == ["no time left"] * 2
    as_ranks(monkeypatch, lambda *_: os._exit(3))
    (row,) = rows_of(tmp_path / "b")
    assert row["status"] == "failed"
    assert "ended with status 3" in row["error"]


def long_steps_on(hardware: Hardware, *words: str) -> LongSteps:
    return LongSteps(compose_settings(["recipe=hf-long", "hardware.demo=never", *words]), hardware)


def test_the_plan_of_an_h200_holds_393_216_tokens_of_an_8b_model_with_adapters() -> None:
    job = long_steps_on(H200)
    told = [job.planned(case) for case in job.cases]
    assert [row["context"] for row in told] == [131072, 262144, 393216]
    assert all(row["memory_estimate_gib"] < 0.9 * 140 for row in told)
    assert told[-1]["host_estimate_gib"] == 96.0
    (largest,) = job.plans()
    assert largest["context"] >= 393216
    assert "llama-8b-lora S=131072 weights fp32 batch 1: memory" in job.plan()


@pytest.mark.parametrize(
    ("name", "least", "devices"),
    [
        ("hf-long-h200", 5, ()),
        ("hf-long-h100", 5, ()),
        ("hf-long-two-gpus-h200", 5, ("trainer.devices=2", "context_parallel=2")),
        ("hf-long-four-gpus-h100", 1, ("trainer.devices=4", "context_parallel=4")),
        ("hf-long-four-gpus-h200", 1, ("trainer.devices=4", "context_parallel=4")),
    ],
)
def test_estimates_are_at_most_a_tenth_above_the_peaks_and_never_below(
    name: str, least: int, devices: tuple[str, ...]
) -> None:
    """But for one row, of code that kept pieces of 65,536 tokens beside each
    other, which is no more."""
    rows = read_result(RESULTS / f"{name}.json").rows
    measured = {
        (r["model"], r["context"]): r
        for r in rows
        if r["peak_memory_gib"] and "by 65,536" not in r["memory"]
    }
    assert len(measured) >= least
    savings = ("memory.offload=true", "memory.ffn_chunk=16384", "memory.loss_chunk=2048")
    for (model, context), row in measured.items():
        case = (f"benchmark.models=[{model}]", f"benchmark.contexts=[{context}]")
        kind = row["memory"].split()[0]  # full, or selective
        words = (*devices, *savings, f"memory.activation_checkpointing={kind}", *case)
        job = long_steps_on(replace(H200, count=4, host_memory_bytes=500 * 2**30), *words)
        estimate = job.planned(job.cases[0])["memory_estimate_gib"]
        assert row["peak_memory_gib"] <= estimate <= 1.1 * row["peak_memory_gib"], (model, context)
        assert estimate == row["memory_estimate_gib"]


def test_the_largest_context_that_memory_auto_takes_is_a_row_of_each_model() -> None:
    job = long_steps_on(
        H200, "benchmark.models=[llama-1b,llama-8b-lora]", "memory.activation_checkpointing=none"
    )
    rows = job.completed([])
    assert [row["model"] for row in rows] == ["llama-1b", "llama-8b-lora"]
    assert {row["implementation"] for row in rows} == {"plan of memory=auto"}
    for row in rows:
        assert row["limited_by"] == "host"
        assert "inputs in host memory" in row["memory"]
        assert row["host_estimate_gib"] <= 0.9 * 120
        assert (
            f"{row['model']} S={row['context']:,} at most by memory.activation_checkpointing=auto"
            in job.plan()
        )
        (longer,) = long_steps_on(H200, f"benchmark.models=[{row['model']}]",
                                  "memory.activation_checkpointing=full",
                                  "memory.offload=true",
                                  f"benchmark.contexts=[{row['context'] + 4096}]"
                                  ).cases  # fmt: skip
        assert "memory.offload" in job.planned(longer)["error"]


def test_the_largest_context_is_limited_by_the_device_where_that_is_full_first() -> None:
    smaller = replace(H200, total_memory_bytes=80 * 2**30, free_memory_bytes=79 * 2**30)
    (row,) = long_steps_on(smaller, "benchmark.models=[llama-3b]").plans()
    assert (row["limited_by"], row["context"] % 4096) == ("device", 0)
    assert 0.9 * 0.9 * 79 < row["memory_estimate_gib"] <= 0.9 * 79
    none = replace(H200, free_memory_bytes=20 * 2**30)  # at no context
    assert long_steps_on(none, "benchmark.models=[llama-8b]").plans() == []


@pytest.mark.parametrize("kind", ["adamw", "lamb", "float32 copies"])
def test_a_measured_step_has_the_states_that_every_later_one_has(kind: str) -> None:
    layer = torch.nn.Linear(3, 2)
    layer.bias.requires_grad = False
    if kind == "float32 copies":
        layer.to(torch.bfloat16)
    optimizer = make_optimizer(kind, layer)
    make_states(optimizer)
    states = optimizer.state[optimizer.param_groups[0]["params"][0]].values()
    assert sum(torch.is_tensor(state) and state.shape == (2, 3) for state in states) == 2
    assert layer.weight.grad is None


def make_optimizer(kind: str, layer: torch.nn.Linear) -> torch.optim.Optimizer:
    if kind == "lamb":
        return Lamb([layer.weight], lr=0.1)
    adamw = torch.optim.AdamW([layer.weight], lr=0.1, weight_decay=0.5)
    return MasterWeights(adamw) if kind == "float32 copies" else adamw


def test_the_settings_of_a_training_are_used() -> None:
    words = [
        "recipe=hf-long",
        "trainer.devices=2",
        "context_parallel=2",
        "hardware.precision=bf16-true",
    ]
    job = LongSteps(compose_settings(words), detect_hardware("cpu"))
    assert (job.adapted.precision, job.adapted.attention) == ("bf16-true", "flash")
    assert job.cases[0].settings().strategy == "context_parallel"


def test_a_plan_says_what_does_not_fit_and_how_several_devices_share_a_sequence() -> None:
    words = [
        "mode=plan",
        "benchmark.models=[qwen3-8b]",
        "benchmark.contexts=[262144]",
        "trainer.devices=8",
    ]
    alone = long_steps_on(planned_hardware("h100", 8), *words).plan().splitlines()
    assert "context_parallel=8 shares it" in alone[0]
    assert alone[1].endswith("does not fit")
    assert (
        "does not fit"
        not in long_steps_on(planned_hardware("h100", 8), *words, "context_parallel=8").plan()
    )
