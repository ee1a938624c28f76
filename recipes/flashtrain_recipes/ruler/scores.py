"""Means of RULER's scores over prompts and tasks, and their differences between two models, with
95% intervals of the bootstrap over prompts.

The scores of a row's prompts are a text, "100 75 0"; those of a mean over tasks "100 75; 0 100".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashtrain.errors import UserError
from flashtrain.report.rows import Row, Rows
from flashtrain_recipes.long_context.intervals import LEVEL, draws
from flashtrain_recipes.ruler.tasks import RULER


def scored(row: Row) -> Row:
    """Return a row with the columns score, score_low and score_high of its prompts' scores."""
    return row | _columns("score", _scores(row))


def mean_rows(rows: Rows) -> list[Row]:
    """Return a row for each length: the mean over those of RULER's eleven tasks that `rows` has."""
    found = []
    for length in dict.fromkeys(row["length"] for row in rows):
        own = [row for row in rows if row["length"] == length and row["task"] in RULER]
        if own:
            one = {**own[0], "task": "mean", "tasks": len(own)}
            one["minutes"] = round(sum(row["minutes"] for row in own), 3)
            one |= {name: "; ".join(row[name] for row in own) for name in ("scores", "prompts")}
            found.append(scored(one))
    return found


def differences(rows: Rows, others: Rows) -> list[Row]:
    """Return {length, task, difference, difference_low, difference_high} for each row: its scores
    less those of `others`, another result's rows, on the same prompts, resampled in pairs. Raises
    UserError if `others` lacks a row, or its prompts are others."""
    theirs, found = {(row["length"], row["task"]): row for row in others}, []
    for row in rows:
        length, task = row["length"], row["task"]
        other = theirs.get((length, task), {"prompts": None})
        if other["prompts"] != row["prompts"]:
            raise UserError(
                f"{task} at {length} tokens: expected scores of the same prompts in both results, "
                "which need the same tokenizer, text, seed and number of samples."
            )
        less = _columns("difference", _scores(row) - _scores(other))
        found.append({"length": length, "task": task, **less})
    return found


def _scores(row: Mapping[str, Any]) -> np.ndarray:
    """The scores of a row's prompts, (tasks, prompts)."""
    return np.array([task.split() for task in row["scores"].split(";")], dtype=float)


def _columns(name: str, scores: np.ndarray) -> Row:
    """The mean of scores (tasks, prompts) and its interval: prompts are resampled, tasks are not.
    One prompt has no interval."""
    prompts = scores.shape[1]
    drawn = [one[draws(prompts, seed)] for seed, one in enumerate(scores)]
    ends = np.percentile(np.mean(drawn, axis=(0, 2)), (50 - 50 * LEVEL, 50 + 50 * LEVEL))
    low, high = ends.round(3).tolist() if prompts > 1 else (None, None)
    return {name: round(float(scores.mean()), 3), f"{name}_low": low, f"{name}_high": high}
