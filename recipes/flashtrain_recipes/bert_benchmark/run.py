"""recipe=bert-speed: whole training steps of BERT, flashtrain beside Hugging Face, all taking turns.

Cases: full rows of each of benchmark.contexts, and benchmark.samples sequences of the lengths that the text's
benchmark.units have, up to the longest of these; each at every benchmark.dropouts. A turn of such a case trains on all
of its sequences once, in as many optimiser steps as the baseline's batches are.
"""

from __future__ import annotations

from typing import Any

from flashtrain_recipes.bert_benchmark.baselines import OURS, all_baselines
from flashtrain_recipes.bert_benchmark.batches import BUCKETS
from flashtrain_recipes.bert_benchmark.cases import BertCase, cases, with_lengths
from flashtrain_recipes.harness.rows import Row, Rows, over_fastest
from flashtrain_recipes.harness.run_folder import Run
from flashtrain_recipes.step_benchmark.run import StepBenchmark
from flashtrain_recipes.step_benchmark.training_step import StepBaseline
from flashtrain_recipes.step_benchmark.turns import StepTurns

_RATE = "real_tokens_per_second"
_CASE = ("model", "length", "longest", "dropout", "weights")
_SAME = ("model", "length", "longest", "weights", "implementation", "padding", "batch")


class BertSteps(StepBenchmark):
    """Every model, precision of weights, dropout, context, batch and unit of the text requested."""

    what = "training steps of BERT"
    columns = (
        "model", "length", "dropout", "weights", "implementation", "padding", "batch", "rows_per_second",
        "real_tokens_per_second", "mfu", "peak_memory_gib", "over_random_batches", "over_length_buckets",
        "without_dropout", "compile_seconds", "status",
    )  # fmt: skip
    rate = "rows_per_second"

    def make_cases(self) -> list[BertCase]:
        return cases(self.settings)

    def make_baselines(self) -> list[StepBaseline]:
        return all_baselines(self.settings, self.hardware, compiled=self.compiled)

    def turns(self, case: BertCase, run: Run, **common: Any) -> StepTurns:  # type: ignore[override]
        return super().turns(with_lengths(case, self.settings, self.hardware), run, **common)

    def completed(self, run: Run) -> list[Row]:
        return compared(run.rows)


def compared(rows: Rows) -> list[Row]:
    """The rows; flashtrain's with over_random_batches and over_length_buckets, real tokens/s over those of the fastest
    Hugging Face row of its case that is batched so (full rows count as random batches). Rows with dropout have
    without_dropout: the time over that of the same implementation and batch without. None where there is no figure."""
    theirs = [row for row in rows if not row["implementation"].startswith(OURS)]
    buckets = [row for row in theirs if row.get("padding") == BUCKETS]
    others = [row for row in theirs if row.get("padding") != BUCKETS]
    found = []
    for row in rows:
        more: Row = {}
        if row.get(_RATE) and row["implementation"].startswith(OURS):
            more["over_random_batches"] = over_fastest(row, others, _RATE, _CASE)
            more["over_length_buckets"] = over_fastest(row, buckets, _RATE, _CASE)
        if row.get(_RATE) and row["dropout"]:
            without = [one for one in rows if one.get("dropout") == 0 and all(one[key] == row[key] for key in _SAME)]
            more["without_dropout"] = over_fastest(without[0], [row], _RATE, ()) if without else None
        found.append({**row, **more})
    return found
