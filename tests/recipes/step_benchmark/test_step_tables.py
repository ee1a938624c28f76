"""From rows to the printed tables and the figure: best batches, speed-ups, and the paper's ratios beside ours."""

from __future__ import annotations

import pytest

from flashtrain.errors import UserError
from flashtrain.report.__main__ import main as report
from flashtrain.report.rows import write_result
from flashtrain_recipes.step_benchmark.contenders import BASELINE, FLASHTRAIN
from flashtrain_recipes.step_benchmark.figures import (
    best_rows,
    case_line,
    context_speed_figure,
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


def test_each_implementation_is_told_at_its_best_batch_and_failures_stay() -> None:
    found = best_rows(ROWS)
    assert [(line["implementation"], line["batch"]) for line in found] == [
        (FLASHTRAIN, 64), ("plain PyTorch, SDPA, compiled", 64), (BASELINE, 16), ("Hugging Face, SDPA, compiled", None)
    ]  # fmt: skip


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


def test_the_tables_are_three_with_every_batch_in_the_last() -> None:
    best, paper, batches = (table.markdown() for table in step_tables(ROWS))
    assert "| 124m | 1,024 | fp32 | flashtrain | 64 | 600,000 | 10.0 |" in best
    assert "out of memory" not in best
    assert "not available (needs transformers)" in best
    assert "| 124m | FlashAttention (paper) | 2.70 | 3.50 | flashtrain | fp32 | 6.00 |" in paper
    assert "| 124m | 1,024 | fp32 | 64 | 600,000 | 520,000 | out of memory |" in batches


def test_a_case_in_a_line() -> None:
    line = case_line(ROWS)
    assert line.startswith("flashtrain 500,000 (batch 16), 600,000 (batch 64); plain PyTorch, SDPA, compiled 520,000")
    assert "Hugging Face, eager 100,000 (batch 16), out of memory (64)" in line


def test_the_figure_of_contexts_marks_where_memory_ended(tmp_path) -> None:
    rows = [row(FLASHTRAIN, 500_000 / n, context=1024 * n) for n in (1, 4, 16)]
    rows += [row("standard", 400_000), row("standard", None, context=4096, status="out of memory")]
    rows += [row("standard", None, None, context=16384, status="no time left")]
    path = context_speed_figure(rows, tmp_path / "context.png")
    assert path.stat().st_size > 10_000
    with pytest.raises(UserError, match="no two contexts"):
        context_speed_figure(ROWS, tmp_path / "none.png")


def test_a_published_result_draws_the_same_figure_by_the_report_command(tmp_path) -> None:
    rows = [row(FLASHTRAIN, 500_000 / n, context=1024 * n) for n in (1, 4)]
    write_result(tmp_path / "speed.json", "context-speed", "python -m flashtrain recipe=context-speed", judged(rows))
    assert report([str(tmp_path / "speed.json"), "--figure", "speed", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "speed.png").stat().st_size > 10_000
    only = ["--only", "best_batch:True", "--columns", "context,implementation,tokens_per_second", "--markdown"]
    assert report([str(tmp_path / "speed.json"), *only]) == 0
