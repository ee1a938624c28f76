"""From rows to the printed tables and the figure: best batches, speed-ups, and the paper's ratios beside ours."""

from __future__ import annotations

import pytest

from flashtrain_recipes.step_benchmark.contenders import BASELINE, FLASHTRAIN
from flashtrain_recipes.step_benchmark.figures import (
    best_rows,
    judged,
    paper_rows,
    step_tables,
)


def row(implementation: str, tokens_per_second: float | None, batch: int | None = 16, **other) -> dict:
    case = {"model": "124m", "context": 1024, "weights": "fp32"}
    memory = None if tokens_per_second is None else 10.0
    figures = {"tokens_per_second": tokens_per_second, "mfu": None, "peak_memory_gib": memory, "milliseconds": 1.0}
    return {"implementation": implementation, **case, "batch": batch, **figures, "compile_seconds": 0.0, **other}


ROWS = [
    row(FLASHTRAIN, 500_000, 16),
    row(FLASHTRAIN, 600_000, 64),
    row("plain PyTorch, SDPA, compiled", 520_000, 64),
    row(BASELINE, 100_000, 16),
    row(BASELINE, None, 64, status="out of memory"),
    row("Hugging Face, SDPA, compiled", None, None, status="not available", error="needs transformers"),
]


def test_speed_ups_are_over_hugging_face_eager_at_its_best_batch() -> None:
    found = judged(ROWS)
    assert [line.get("speedup") for line in found] == [5.0, 6.0, 5.2, 1.0, None, None]
    assert [line.get("best_batch") for line in found] == [False, True, True, True, None, None]
    assert found[1]["paper_speedup"] == 3.5


def test_without_the_baseline_there_is_no_speed_up_and_the_rest_stands() -> None:
    assert [line["speedup"] for line in judged(ROWS[:3])] == [None, None, None]


def test_precisions_of_weights_are_not_compared_with_each_other() -> None:
    found = judged([*ROWS, row(FLASHTRAIN, 700_000, 64, weights="bf16")])
    assert found[-1]["speedup"] is None


def test_the_papers_table_2_stands_beside_ours() -> None:
    found = {line["implementation"]: line for line in paper_rows(best_rows(ROWS))}
    assert [found[f"{name} (paper)"]["paper_days"] for name in ("Hugging Face", "Megatron-LM", "FlashAttention")] == [
        9.5, 4.7, 2.7
    ]  # fmt: skip
    assert found["FlashAttention (paper)"]["paper_speedup"] == 3.5
    assert found["FlashAttention (paper)"]["speedup"] == 6.0
    assert found["Megatron-LM (paper)"]["speedup"] is None  # nothing here is its counterpart


def test_the_papers_speed_ups_agree_with_its_days() -> None:
    medium = [dict(line, model="355m") for line in ROWS]
    for line in paper_rows(best_rows([*ROWS, *medium])):
        slowest = {"124m": 9.5, "355m": 21.0}[line["model"]]
        assert line["paper_speedup"] == pytest.approx(slowest / line["paper_days"], abs=0.06)


def test_other_contexts_have_no_counterpart_in_the_paper() -> None:
    longer = [dict(line, context=4096) for line in ROWS]
    assert paper_rows(best_rows(longer)) == []
    assert len(step_tables(longer)) == 2
