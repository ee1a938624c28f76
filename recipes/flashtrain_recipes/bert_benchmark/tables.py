"""What bert-speed prints: every implementation's best batch, and flashtrain's speed over the best peer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashtrain.report.rows import Row, values_of
from flashtrain.report.table import Table, make_table
from flashtrain_recipes.bert_benchmark.batches import BUCKETS

OURS = "flashtrain"
_CASE = ("model", "length", "longest", "dropout", "weights")
_COLUMNS = (
    "model", "length", "dropout", "weights", "implementation", "padding", "batch", "rows_per_second",
    "real_tokens_per_second", "mfu", "peak_memory_gib", "over_random_batches", "over_length_buckets",
    "without_dropout", "compile_seconds", "status",
)  # fmt: skip

Rows = Sequence[Mapping[str, Any]]


def judged(rows: Rows) -> list[Row]:
    """The rows; flashtrain's with over_random_batches and over_length_buckets, real tokens/s over those of the fastest
    Hugging Face row of its case that is batched so (full rows count as random batches). Rows with dropout have
    without_dropout: the time over that of the same implementation and batch without. None where there is no figure."""
    found = []
    for row in rows:
        told: Row = {key: value for key, value in row.items() if key != "title"}
        rate = _rate(row)
        if rate and row["implementation"].startswith(OURS):
            peers = [one for one in rows if _case(one) == _case(row) and not one["implementation"].startswith(OURS)]
            for name, buckets in (("over_random_batches", False), ("over_length_buckets", True)):
                best = max((_rate(one) for one in peers if (one["padding"] == BUCKETS) == buckets), default=0.0)
                told[name] = round(rate / best, 3) if best else None
        if rate and row["dropout"]:
            without = [one for one in rows if _alike(one, row) and not one["dropout"]]
            told["without_dropout"] = round(_rate(without[0]) / rate, 3) if without else None
        found.append(told)
    return found


def bert_table(rows: Rows) -> Table:
    """All rows, case by case."""
    columns = [key for key in _COLUMNS if values_of(rows, key)]
    return make_table(rows, columns, "BERT's training steps; real tokens are those that are no padding")


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    keys = ("model", "length", "longest", "weights", "implementation", "padding", "batch")
    return bool(_rate(one)) and all(one[key] == other[key] for key in keys)


def _case(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in _CASE)


def _rate(row: Mapping[str, Any]) -> float:
    return float(row.get("real_tokens_per_second") or 0.0)
