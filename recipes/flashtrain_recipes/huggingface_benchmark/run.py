"""recipe=hf-speed: whole training steps of transformers' decoders, flashtrain's beside transformers' own, in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashtrain.report.rows import values_of
from flashtrain.report.table import Table, make_table
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.benchmark_runner.measuring import Row
from flashtrain_recipes.benchmark_runner.run import Run
from flashtrain_recipes.huggingface_benchmark.cases import HuggingFaceCase, cases
from flashtrain_recipes.huggingface_benchmark.contenders import Shared, everyone
from flashtrain_recipes.step_benchmark.figures import case_line
from flashtrain_recipes.step_benchmark.measure import NO_TIME, case_columns
from flashtrain_recipes.step_benchmark.run import StepBenchmark
from flashtrain_recipes.step_benchmark.training_step import Contender

_CASE = ("model", "context", "batch", "weights")
_COLUMNS = (
    "model", "context", "batch", "weights", "implementation", "tokens_per_second", "milliseconds", "mfu",
    "peak_memory_gib", "memory_estimate_gib", "memory", "over_eager", "over_compiled", "compile_seconds", "status",
)  # fmt: skip


class HuggingFaceSteps(StepBenchmark):
    """Every model, precision of weights and context asked for."""

    def __init__(self, settings: Settings, hardware: Hardware) -> None:
        self.todo: list[HuggingFaceCase] = cases(settings)
        self.shared = Shared(hardware, updates=settings.benchmark.updates)
        super().__init__(settings, hardware)

    def everyone(self, compiled: bool) -> list[Contender]:
        return everyone(self.shared, compiled)

    def line(self) -> str:
        steps = "steps" if self.asked.updates else "forward and backward passes"
        names = "; ".join(contender.title for contender in self.contenders)
        return (
            f"transformers' decoders: {len(self.todo)} cases, {self.asked.rounds} rounds of {self.asked.steps} {steps}"
            f"{self.limit()}, on {self.hardware.name}: {names}"
        )

    def plan_line(self, case: HuggingFaceCase) -> str:
        """With what flashtrain's step is estimated to need at each batch."""
        parts = []
        for batch in self.batches_of(case):
            words, estimate = self.shared.decoder(case, batch)[2]
            parts.append(f"batch {batch}: {words or 'no savings'}, {estimate} GiB")
        return f"{case}: {'; '.join(parts)}"

    def known(self, case: HuggingFaceCase, rows: Sequence[Row]) -> dict[str, Any]:
        return {"peak_flops": self.hardware.peak_flops}

    def row(self, row: Row, case: HuggingFaceCase, batches: Sequence[int]) -> Row:
        return row if self.asked.updates else {**row, "part": "forward and backward"}

    def not_begun(self, case: HuggingFaceCase) -> list[Row]:
        empty = {"tokens_per_second": None, "status": NO_TIME}
        return [{**case_columns(contender.title, case, None), **empty} for contender in self.contenders]

    def told(self, rows: Sequence[Row]) -> str:
        return case_line(rows)

    def completed(self, run: Run) -> list[Row]:
        return judged(run.rows)

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        columns = [key for key in _COLUMNS if values_of(rows, key)]
        return [make_table(rows, columns, "training steps of transformers' decoders")]

    def best(self, rows: Sequence[Row]) -> dict[str, float]:
        """flashtrain's tokens/s in each case."""
        return {
            f"tokens_per_second_{row['model']}_{row['context']}_{row['batch']}": row["tokens_per_second"]
            for row in rows
            if row["implementation"] == self.contenders[0].title and row.get("tokens_per_second")
        }


def judged(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows; those of flashtrain, or of its attention, with over_eager and over_compiled: tokens/s over that of the
    fastest SDPA row, eager and compiled, of the case and batch. None where there is none."""
    found = []
    for row in rows:
        told = dict(row)
        if row.get("tokens_per_second") and "SDPA" not in row["implementation"]:
            same = [
                one for one in rows if all(one[key] == row[key] for key in ("model", "context", "batch", "weights"))
            ]
            for name, compiled in (("over_eager", False), ("over_compiled", True)):
                peers = [one for one in same if "SDPA" in one["implementation"]]
                peers = [one for one in peers if ("compiled" in one["implementation"]) == compiled]
                best = max((one.get("tokens_per_second") or 0.0 for one in peers), default=0.0)
                told[name] = round(row["tokens_per_second"] / best, 3) if best else None
        found.append(told)
    return found
