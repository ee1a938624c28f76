"""From each length's losses on the same tokens to rows: perplexities, intervals, and whether longer was better.

N windows, T scored tokens of a window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from flashtrain.report.rows import Row
from flashtrain_recipes.long_context.bootstrap import Interval, draws, mean_interval, per_unit
from flashtrain_recipes.long_context.published import paper_columns
from flashtrain_recipes.long_context.windows import Windows

LENGTHS, POSITIONS = "lengths", "positions"  # what a row is, under its key "part"
BETTER, WORSE, EQUAL, UNKNOWN = "better", "worse", "no better", "too little text to tell"
PHRASES = {WORSE: "is worse than", EQUAL: "is no better than", UNKNOWN: "cannot, with so little text, be told from"}
KEPT = (
    "model",
    "attention",
    "steps",
    "tokens",
    "batch",
    "precision",
    "micro_batch",
    "memory",
    "tokens_per_second",
    "mfu",
)


@dataclass(frozen=True)
class Scores:
    """One length's losses in nats, (N, T) each: in one pass, and sliding (see score_windows)."""

    whole: np.ndarray
    sliding: np.ndarray


def length_rows(
    trained: Mapping[int, Mapping[str, Any]],
    scores: Mapping[int, Scores],
    windows: Windows,
    *,
    resamples: int,
    seed: int,
) -> list[Row]:
    """A row a length, shortest first, from the summary rows of the trainings and the scores of the finished ones.

    A length that has no scores stays a row with its status and error. `against_shorter` compares with the next
    shorter length that has scores, by the interval of the mean difference over the same resampled units;
    `loss_less_shorter` and `loss_less_shortest` are that difference in nats, to the next shorter and the shortest.
    """
    drawn = draws(windows.count, resamples, seed)
    base = next((_per_token(trained[context]) for context in sorted(scores)), None)
    rows: list[Row] = []
    shorter: Scores | None = None
    shortest = scores[min(scores)] if scores else None
    for context in sorted(trained):
        summary = trained[context]
        row: Row = {"part": LENGTHS, "implementation": "flashtrain", "context": context}
        row.update({key: summary[key] for key in KEPT if summary.get(key) is not None})
        if context not in scores:
            failure = {key: summary[key] for key in ("status", "error") if summary.get(key)}
            rows.append({**row, **failure, **paper_columns(context)})
            continue
        found = scores[context]
        seconds = _per_token(summary)
        rows.append(
            {
                **row,
                **_perplexity("perplexity", found.whole, windows, drawn),
                **_perplexity("perplexity_sliding", found.sliding, windows, drawn),
                "against_shorter": None if shorter is None else verdict(shorter.whole, found.whole, windows, drawn),
                "against_shorter_sliding": None
                if shorter is None
                else verdict(shorter.sliding, found.sliding, windows, drawn),
                **_less("loss_less_shorter", shorter, found, windows, drawn),
                **_less("loss_less_shortest", shortest, found, windows, drawn),
                "train_seconds": None if seconds is None else round(seconds * summary["tokens"], 1),
                "time_ratio": None if seconds is None or base is None else round(seconds / base, 4),
                "peak_memory_gib": summary.get("peak_memory_gib"),
                **paper_columns(context),
                "scored_tokens": int(found.whole.size),
                "units": windows.count,
                "unit": windows.unit,
            }
        )
        shorter = found
    return rows


def position_rows(scores: Mapping[int, Scores], bins: int) -> list[Row]:
    """Mean loss of each length by place among the scored tokens: `bins` rows a length, `position` a bin's first."""
    rows = []
    for context, found in sorted(scores.items()):
        edges = np.linspace(0, found.whole.shape[1], bins + 1).round().astype(int)
        for low, high in pairwise(edges):
            rows.append(
                {
                    "part": POSITIONS,
                    "implementation": "flashtrain",
                    "context": context,
                    "position": int(low),
                    "loss": round(float(found.whole[:, low:high].mean(dtype=np.float64)), 5),
                    "loss_sliding": round(float(found.sliding[:, low:high].mean(dtype=np.float64)), 5),
                }
            )
    return rows


def difference(shorter: np.ndarray, longer: np.ndarray, windows: Windows, drawn: np.ndarray) -> Interval:
    """Mean loss of the longer context less that of the shorter, in nats, on the same tokens: below 0 is better."""
    return mean_interval(*per_unit(longer.astype(np.float64) - shorter, windows.units), drawn)


def verdict(shorter: np.ndarray, longer: np.ndarray, windows: Windows, drawn: np.ndarray) -> str:
    """Whether the longer context predicted the same tokens better, as far as the text can tell."""
    found = difference(shorter, longer, windows, drawn)
    if found.low is None or found.high is None:
        return UNKNOWN
    if found.high < 0:
        return BETTER
    return WORSE if found.low > 0 else EQUAL


def remarks(rows: Sequence[Row]) -> list[str]:
    """A line for every length that was not better than the next shorter one; empty where each was."""
    lines = []
    scored = [row for row in rows if row["part"] == LENGTHS and row.get("perplexity") is not None]
    for before, row in pairwise(scored):
        for suffix, how in (("", "reading each window once"), ("_sliding", "with its full context for every token")):
            told = row[f"against_shorter{suffix}"]
            if told != BETTER:
                pair = f"{row[f'perplexity{suffix}']:.2f} against {before[f'perplexity{suffix}']:.2f}"
                lengths = f"context {row['context']:,} {PHRASES[told]} {before['context']:,}"
                lines.append(f"{lengths}, {how}: perplexity {pair}")
    return lines


def _perplexity(name: str, losses: np.ndarray, windows: Windows, drawn: np.ndarray) -> Row:
    found = mean_interval(*per_unit(losses, windows.units), drawn)
    parts = {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
    return {key: None if value is None else round(math.exp(value), 4) for key, value in parts.items()}


def _less(name: str, shorter: Scores | None, longer: Scores, windows: Windows, drawn: np.ndarray) -> Row:
    """The difference in loss to a shorter length and its interval, read in one pass and sliding; None for the first."""
    row: Row = {}
    for suffix, kind in (("", "whole"), ("_sliding", "sliding")):
        found: tuple[float | None, ...] = (None, None, None)
        if shorter is not None and shorter is not longer:
            found = difference(getattr(shorter, kind), getattr(longer, kind), windows, drawn)
        for end, value in zip(("", "_low", "_high"), found, strict=True):
            row[f"{name}{suffix}{end}"] = None if value is None else round(value, 5)
    return row


def _per_token(summary: Mapping[str, Any]) -> float | None:
    """Seconds of training a token, from the median step: start-up, compiling and validation are left out."""
    rate = summary.get("tokens_per_second")
    return 1 / rate if rate else None
