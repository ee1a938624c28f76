"""recipe=bert-speed: time whole training steps of BERT, by flashtrain and Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashtrain_recipes.bert_benchmark.baselines import all_baselines
from flashtrain_recipes.bert_benchmark.batches import BUCKETS
from flashtrain_recipes.bert_benchmark.cases import BertCase, cases, with_lengths
from flashtrain_recipes.harness.rows import Over
from flashtrain_recipes.step_benchmark.baselines import FLASHTRAIN
from flashtrain_recipes.step_benchmark.run import StepBenchmark
from flashtrain_recipes.step_benchmark.training_step import StepBaseline
from flashtrain_recipes.step_benchmark.turns import StepTurns

_CASE = ("model", "length", "longest", "dropout", "weights")
_SAME = ("model", "length", "longest", "weights", "implementation", "padding", "batch")


def _is_ours(row: Mapping[str, Any]) -> bool:
    return bool(row["implementation"].startswith(FLASHTRAIN))


def _over(column: str, *, buckets: bool) -> Over:
    """Return the column that divides flashtrain's rates by Hugging Face's on batches of like length
    (buckets) or on random batches."""

    def baseline(row: Mapping[str, Any]) -> bool:
        return not _is_ours(row) and (row.get("padding") == BUCKETS) == buckets

    return Over(column, "real_tokens_per_second", _CASE, baseline, _is_ours)


class BertSteps(StepBenchmark):
    """The benchmark of BERT's training steps, on full rows and on a text's sentences,
    paragraphs or documents."""

    what = "training steps of BERT"
    columns = (
        "model", "length", "dropout", "weights", "implementation", "padding", "batch",
        "rows_per_second",
        "real_tokens_per_second", "mfu", "peak_memory_gib", "over_random_batches",
        "over_length_buckets",
        "without_dropout", "compile_seconds", "status",
    )  # fmt: skip
    rate = "rows_per_second"
    over = (
        _over("over_random_batches", buckets=False),
        _over("over_length_buckets", buckets=True),
        # how many times longer the same takes with dropout
        Over(
            "without_dropout",
            "milliseconds",
            _SAME,
            lambda row: row.get("dropout") == 0,
            lambda row: row["dropout"],
        ),
    )

    def make_cases(self) -> list[BertCase]:
        return cases(self.settings)

    def make_baselines(self) -> list[StepBaseline]:
        return all_baselines(self.settings, self.hardware, compiled=self.compiled)

    def turns(self, case: BertCase, **common: Any) -> StepTurns:  # type: ignore[override]
        return super().turns(with_lengths(case, self.settings, self.hardware), **common)
