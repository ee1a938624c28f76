"""What compares rows: best batches, speed-ups, and the paper's next to ours."""

from __future__ import annotations

from flashtrain_recipes.step_benchmark.baselines import EAGER, FLASHTRAIN
from flashtrain_recipes.step_benchmark.figures import SPEEDUP, with_best_batches


def row(
    implementation: str, tokens_per_second: float | None, batch: int | None = 16, **other
) -> dict:
    case = {"model": "124m", "context": 1024, "weights": "fp32"}
    memory = None if tokens_per_second is None else 10.0
    figures = {
        "tokens_per_second": tokens_per_second,
        "mfu": None,
        "peak_memory_gib": memory,
        "milliseconds": 1.0,
    }
    return {
        "implementation": implementation,
        **case,
        "batch": batch,
        **figures,
        "compile_seconds": 0.0,
        **other,
    }


ROWS = [
    row(FLASHTRAIN, 500_000, 16),
    row(FLASHTRAIN, 600_000, 64),
    row("plain PyTorch, SDPA, compiled", 520_000, 64),
    row(EAGER, 100_000, 16),
    row(EAGER, None, 64, status="out of memory"),
    row(
        "Hugging Face, SDPA, compiled",
        None,
        None,
        status="not available",
        error="needs transformers",
    ),
]


def test_speed_ups_are_over_hugging_face_eager_at_its_best_batch() -> None:
    found = with_best_batches([{**line, **SPEEDUP.of(line, ROWS)} for line in ROWS])
    assert [line.get("speedup") for line in found] == [5.0, 6.0, 5.2, 1.0, None, None]
    assert [line.get("best_batch") for line in found] == [False, True, True, True, None, None]
    assert found[1]["paper_speedup"] == 3.5


def test_other_contexts_have_no_counterpart_in_the_paper() -> None:
    longer = [dict(line, context=4096) for line in ROWS]
    assert not any("paper_speedup" in line for line in with_best_batches(longer))
