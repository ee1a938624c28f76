"""Rows that compare contexts: perplexities on the same tokens, whether a longer context was
better, the paper's values.

The paper is FlashAttention (Dao et al. 2022, arXiv 2205.14135), whose Table 4
recipe=gpt2-long repeats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flashtrain.report.rows import Row
from flashtrain_recipes.long_context.evaluate import Scores, Windows
from flashtrain_recipes.long_context.intervals import (
    Interval,
    draws,
    mean_interval,
    per_unit,
)

LENGTHS = "lengths"  # what a row is, under its key "part"; older results have "positions" too
BETTER, WORSE, EQUAL, UNKNOWN = "better", "worse", "no better", "too little text to tell"
_COLUMNS = (
    "model", "attention", "steps", "tokens", "batch", "precision", "micro_batch", "memory",
    "tokens_per_second", "mfu",
)  # fmt: skip
PAPER = "FlashAttention (Dao et al. 2022), Table 4: GPT-2 small on OpenWebText, 8 A100"
# Context -> (perplexity on OpenWebText, days of training), of GPT-2 small with FlashAttention.
PAPER_TABLE_4: dict[int, tuple[float, float]] = {
    1024: (18.2, 2.7),
    2048: (17.6, 3.0),
    4096: (17.5, 3.6),
}


def paper_columns(context: int) -> dict[str, float | None]:
    """Return the paper's perplexity, days of training and time relative to context 1024; None
    where it has no value."""
    perplexity, days = PAPER_TABLE_4.get(context, (None, None))
    ratio = None if days is None else round(days / PAPER_TABLE_4[1024][1], 3)
    return {"paper_perplexity": perplexity, "paper_days": days, "paper_time_ratio": ratio}


def meets_the_paper(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether two or more of the rows' contexts are among those in the paper's table."""
    return len({row["context"] for row in rows} & set(PAPER_TABLE_4)) > 1


def length_rows(
    trained: Mapping[int, Mapping[str, Any]],
    scores: Mapping[int, Scores],
    windows: Windows,
    *,
    seed: int,
) -> list[Row]:
    """Return a row for each context, shortest first; a context without scores has its
    training's status and error.

    The columns `loss_less_shorter` and `loss_less_shortest` are the mean loss, in nats, minus that
    of the next shorter and the shortest context with scores: negative where the longer context is
    better. Their intervals use the same resampled units; `against_shorter` is the verdict in words.

    Args:
        trained: {context: the training's summary row}.
        scores: {context: {ending of a column's name: losses, (N, T) in nats}} of the trainings
            that finished.
        windows: the scored windows, whose units (documents) are resampled for the intervals.
        seed: decides which units are resampled.
    """
    drawn = draws(windows.count, seed)
    base = next((_per_token(trained[context]) for context in sorted(scores)), None)
    rows: list[Row] = []
    shorter: Scores | None = None
    for context, summary in sorted(trained.items()):
        row: Row = {"part": LENGTHS, "implementation": "flashtrain", "context": context}
        row.update({key: summary[key] for key in _COLUMNS if summary.get(key) is not None})
        if context not in scores:
            failure = {key: summary[key] for key in ("status", "error") if summary.get(key)}
            rows.append({**row, **failure, **paper_columns(context)})
            continue
        found = scores[context]
        for kind, losses in found.items():
            row |= _columns(
                f"perplexity{kind}", _interval(losses, windows, drawn), of=math.exp, digits=4
            )
            less = None if shorter is None else _interval(losses - shorter[kind], windows, drawn)
            row[f"against_shorter{kind}"] = None if less is None else verdict(less)
            row |= _columns(f"loss_less_shorter{kind}", less)
            less = (
                None
                if shorter is None
                else _interval(losses - scores[min(scores)][kind], windows, drawn)
            )
            row |= _columns(f"loss_less_shortest{kind}", less)
        seconds = _per_token(summary)
        rows.append(
            {
                **row,
                "train_seconds": None if seconds is None else round(seconds * summary["tokens"], 1),
                "time_ratio": None if seconds is None or base is None else round(seconds / base, 4),
                "peak_memory_gib": summary.get("peak_memory_gib"),
                **paper_columns(context),
                "scored_tokens": int(losses.size),
                "units": windows.count,
                "unit": windows.unit,
            }
        )
        shorter = found
    return rows


def verdict(less: Interval) -> str:
    """Return in words whether the longer context was better, given `less`, the interval of its
    loss minus the shorter context's loss."""
    if less.low is None or less.high is None:
        return UNKNOWN
    if less.high < 0:
        return BETTER
    return WORSE if less.low > 0 else EQUAL


def _interval(losses: np.ndarray, windows: Windows, drawn: np.ndarray) -> Interval:
    return mean_interval(*per_unit(losses, windows.units), drawn)


def _columns(
    name: str, found: Interval | None, *, of: Callable[[float], float] = float, digits: int = 5
) -> dict[str, float | None]:
    ends = zip(("", "_low", "_high"), found or (None, None, None), strict=True)
    return {
        f"{name}{end}": None if value is None else round(of(value), digits) for end, value in ends
    }


def _per_token(summary: Mapping[str, Any]) -> float | None:
    # seconds of training a token, from the median step: without start-up, compiling and validation
    rate = summary.get("tokens_per_second")
    return 1 / rate if rate else None
