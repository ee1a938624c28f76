"""recipe=hf-speed: whole training steps of transformers' decoders, flashtrain's beside transformers' own, in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashtrain_recipes.harness.rows import Row, over_fastest
from flashtrain_recipes.harness.run_folder import Run
from flashtrain_recipes.harness.turns import Effort
from flashtrain_recipes.huggingface_benchmark.baselines import everyone
from flashtrain_recipes.huggingface_benchmark.baselines.base import HuggingFaceBaseline
from flashtrain_recipes.huggingface_benchmark.cases import HuggingFaceCase, cases
from flashtrain_recipes.step_benchmark.run import StepBenchmark


class HuggingFaceSteps(StepBenchmark):
    """Every model, precision of weights, context and batch requested."""

    what = "training steps of transformers' decoders"
    columns = (
        "model", "context", "batch", "weights", "implementation", "tokens_per_second", "milliseconds", "mfu",
        "peak_memory_gib", "memory_estimate_gib", "memory", "over_eager", "over_compiled", "compile_seconds", "status",
    )  # fmt: skip

    def make_cases(self) -> list[HuggingFaceCase]:
        return cases(self.settings)

    def make_baselines(self) -> Sequence[HuggingFaceBaseline]:
        return everyone(self.hardware, updates=self.options.updates, compiled=self.compiled)

    def plan_line(self, case: HuggingFaceCase) -> str:
        """With what flashtrain's step is estimated to need."""
        words, estimate = self.make_baselines()[0].memory(case)
        return f"{case}: {words or 'no savings'}, {estimate} GiB"

    def measure(self, run: Run, number: int, case: HuggingFaceCase, effort: Effort) -> list[Row]:
        part = {} if self.options.updates else {"part": "forward and backward"}
        return [{**row, **part} for row in super().measure(run, number, case, effort)]

    def completed(self, run: Run) -> list[Row]:
        return judged(run.rows)


def judged(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows; those of flashtrain, or of its attention, with over_eager and over_compiled: tokens/s over that of the
    fastest SDPA row, eager and compiled, of the case and batch. None where there is none."""
    rate, same = "tokens_per_second", ("model", "context", "batch", "weights")
    theirs = [row for row in rows if "SDPA" in row["implementation"]]
    compiled = [row for row in theirs if "compiled" in row["implementation"]]
    eager = [row for row in theirs if row not in compiled]
    found = []
    for row in rows:
        ours = row.get(rate) and row not in theirs
        over = {"over_eager": eager, "over_compiled": compiled} if ours else {}
        found.append({**row, **{name: over_fastest(row, others, rate, same) for name, others in over.items()}})
    return found
