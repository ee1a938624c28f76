"""recipe=bert-speed: whole training steps of BERT, flashtrain beside Hugging Face, all taking turns.

Cases: full rows of each of benchmark.contexts, and benchmark.samples sequences of the lengths that the text's
benchmark.units have, up to the longest of these; each at every benchmark.dropouts. A turn of such a case trains on all
of its sequences once, in as many optimiser steps as the implementation's batches are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashtrain.report.rows import values_of
from flashtrain.report.table import Table, make_table
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.benchmark_runner.measuring import Row
from flashtrain_recipes.benchmark_runner.run import Run
from flashtrain_recipes.bert_benchmark.cases import BUCKETS, BertCase, cases, with_lengths
from flashtrain_recipes.bert_benchmark.contenders import BertContender, all_bert_contenders
from flashtrain_recipes.step_benchmark.run import StepBenchmark

OURS = "flashtrain"
_CASE = ("model", "length", "longest", "dropout", "weights")
_COLUMNS = (
    "model", "length", "dropout", "weights", "implementation", "padding", "batch", "rows_per_second",
    "real_tokens_per_second", "mfu", "peak_memory_gib", "over_random_batches", "over_length_buckets",
    "without_dropout", "compile_seconds", "status",
)  # fmt: skip

Rows = Sequence[Mapping[str, Any]]


class BertSteps(StepBenchmark):
    """Every model, precision of weights, dropout, context and unit of the text asked for."""

    def __init__(self, settings: Settings, hardware: Hardware) -> None:
        super().__init__(settings, hardware)
        self.todo: list[BertCase] = cases(settings)

    def everyone(self, compiled: bool) -> list[BertContender]:
        return all_bert_contenders(self.settings, self.hardware, compiled=compiled)

    def line(self) -> str:
        asked, activation = self.asked, self.settings.bert.activation
        form = "the exact form" if activation == "gelu_exact" else "the tanh form"
        names = "; ".join(one.title for one in self.contenders)
        return (
            f"BERT's training steps: {len(self.todo)} cases, {asked.rounds} rounds of {asked.steps} steps"
            f"{self.limit()}, {activation or 'gelu'} on all sides ({form}), on {self.hardware.name}: {names}"
        )

    def case_line(self, case: BertCase) -> str:
        return f"{case}, batch {', '.join(map(str, self.batches_of(case)))}"

    def prepared(self) -> list[BertCase]:
        return [with_lengths(case, self.settings, self.hardware) for case in super().prepared()]

    def taking_part(self, case: BertCase) -> list[BertContender]:
        """Full rows have no length buckets."""
        return [one for one in self.contenders if case.unit or one.batching != BUCKETS]

    def together(self, case: BertCase) -> list[list[int]]:
        # Sequences of a text's lengths are all trained on in a call: a measurement has one batch then.
        batches = self.batches_of(case)
        return [[batch] for batch in batches] if case.unit else [batches]

    def row(self, row: Row, case: BertCase, batches: Sequence[int]) -> Row:
        """A row of StepMeasurement in this table's words. batch: rows of a padded step, whatever a call trained on."""
        contender = next(one for one in self.contenders if one.title == row["implementation"])
        batch = batches[0] if case.unit else row["batch"]
        peak = self.hardware.peak_flops
        seconds = None if not row.get("milliseconds") else row["milliseconds"] / 1e3
        lengths = None if batch is None else case.lengths_of(batch)
        rates: Row = dict.fromkeys(("rows_per_second", "real_tokens_per_second", "mfu"))
        if seconds is not None and lengths is not None:
            rates = {
                "rows_per_second": round(len(lengths) / seconds, 2),
                "real_tokens_per_second": round(float(lengths.sum()) / seconds, 1),
                "mfu": None if peak is None else round(case.flops_of(batch) / seconds / peak, 4),
            }
        left_out = ("implementation", "model", "context", "batch", "tokens_per_second", "mfu")
        return {
            "implementation": contender.implementation,
            "model": case.model,
            "length": case.unit or case.context,
            "longest": case.context,
            "padding": contender.padding(case),
            "dropout": case.dropout,
            "batch": batch,
            **rates,
            **{key: value for key, value in row.items() if key not in left_out},
            "activation": case.activation,
            "title": contender.title,
        }

    def told(self, rows: Sequence[Row]) -> str:
        told = [f"{row['title']} {row['rows_per_second']:,.1f}" for row in rows if row["rows_per_second"]]
        return f"sequences/s: {'; '.join(told) or 'nothing could be measured'}"

    def completed(self, run: Run) -> list[Row]:
        return judged(run.rows)

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        return [bert_table(rows)]

    def best(self, rows: Sequence[Row]) -> dict[str, float]:
        """Packed flashtrain's sequences/s in each case."""
        return {
            f"rows_per_second_{row['model']}_{row['length']}_dropout_{row['dropout']:g}": row["rows_per_second"]
            for row in rows
            if row["implementation"] == "flashtrain, packed" and row.get("rows_per_second")
        }


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
