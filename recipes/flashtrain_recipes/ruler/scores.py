"""Means of RULER's scores over prompts and tasks, and their differences between two models, with
95% intervals of the bootstrap over prompts.

The scores of a row's prompts are a text, "100 75 0"; those of a mean over tasks "100 75; 0 100".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flashtrain.errors import UserError
from flashtrain.report.rows import Row
from flashtrain_recipes.long_context.intervals import LEVEL, draws
from flashtrain_recipes.ruler.tasks import RULER

_RESAMPLES = 2000
Rows = Sequence[Mapping[str, Any]]


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
    less those of the other model on the same prompts, which are resampled in pairs.

    Args:
        rows, others: the rows of two results of mode=ruler.

    Raises:
        UserError: `others` lacks a row, or its prompts are others.
    """
    theirs, found = {(row["length"], row["task"]): row for row in others}, []
    for row in rows:
        length, task = row["length"], row["task"]
        other = theirs.get((length, task), {"prompts": None})
        if other["prompts"] != row["prompts"]:
            raise UserError(
                f"{task} at {length} tokens: expected scores of the same prompts in both results, "
                "which need the same tokenizer, text, seed and number of samples."
            )
        less = [one - two for one, two in zip(_scores(row), _scores(other), strict=True)]
        found.append({"length": length, "task": task, **_columns("difference", less)})
    return found


def _scores(row: Mapping[str, Any]) -> list[np.ndarray]:
    return [np.array(task.split(), dtype=float) for task in row["scores"].split(";")]


def _columns(name: str, scores: Sequence[np.ndarray]) -> Row:
    """The mean over tasks of the means over prompts, and its interval: prompts are resampled within
    their task. A single prompt has no interval."""
    drawn = [draws(len(one), _RESAMPLES, seed) for seed, one in enumerate(scores)]
    means = np.mean([one[at].mean(axis=1) for one, at in zip(scores, drawn, strict=True)], axis=0)
    tail = 50 * (1 - LEVEL)
    found = np.array(
        [np.mean([one.mean() for one in scores]), *np.percentile(means, (tail, 100 - tail))]
    )
    alone = min(map(len, scores)) < 2
    ends = zip(("", "_low", "_high"), found.round(3).tolist(), strict=True)
    return {f"{name}{end}": None if alone and end else one for end, one in ends}
