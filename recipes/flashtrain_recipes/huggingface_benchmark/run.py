"""recipe=hf-speed: time whole training steps of transformers' decoders, by
flashtrain and by transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flashtrain_recipes.harness.rows import Over, Row
from flashtrain_recipes.harness.run_folder import Run
from flashtrain_recipes.harness.turns import Effort
from flashtrain_recipes.huggingface_benchmark.baselines import LIGER, everyone
from flashtrain_recipes.huggingface_benchmark.baselines.base import HuggingFaceBaseline
from flashtrain_recipes.huggingface_benchmark.cases import HuggingFaceCase
from flashtrain_recipes.step_benchmark.cases import batches_of
from flashtrain_recipes.step_benchmark.run import StepBenchmark


def _over(column: str, is_baseline: Callable[[str], bool], theirs: str) -> Over:
    """Return the column that divides rates by the fastest baseline's.

    Args:
        is_baseline: returns whether an implementation, by its title, is compared with.
        theirs: part of the titles of implementations that do not get the column.
    """
    return Over(
        column,
        StepBenchmark.rate,
        ("model", "context", "batch", "documents", "weights"),
        lambda row: is_baseline(row["implementation"]),
        lambda row: theirs not in row["implementation"],
    )


class HuggingFaceSteps(StepBenchmark):
    """The benchmark of decoders' steps: every requested model, precision of
    weights, context and batch."""

    what = "training steps of transformers' decoders"
    columns = (
        "model", "context", "batch", "documents", "weights", "implementation", "tokens_per_second",
        "milliseconds", "mfu", "peak_memory_gib", "memory_estimate_gib", "memory", "over_eager",
        "over_compiled", "over_liger", "compile_seconds", "status",
    )  # fmt: skip
    over = (
        _over("over_eager", lambda title: "SDPA" in title and "compiled" not in title, "SDPA"),
        _over("over_compiled", lambda title: "SDPA" in title and "compiled" in title, "SDPA"),
        _over("over_liger", lambda title: title == f"{LIGER}, eager", LIGER),
    )

    def make_cases(self) -> list[HuggingFaceCase]:
        options = self.options
        return [
            HuggingFaceCase(model, context, weights, self.settings, batch, documents=documents)
            for model in options.models
            for weights in options.weights
            for context in sorted(options.contexts)
            for batch in batches_of(options, context)
            for documents in options.documents
        ]

    def make_baselines(self) -> Sequence[HuggingFaceBaseline]:
        return everyone(self.hardware, updates=self.options.optimizer_step, compiled=self.compiled)

    def plan_line(self, case: HuggingFaceCase) -> str:
        """Return the case with the memory savings and the estimated peak memory in
        GiB of flashtrain's step."""
        words, estimate = self.make_baselines()[0].memory(case)
        return f"{case}: {words or 'no savings'}, {estimate} GiB"

    def measure(self, run: Run, number: int, case: HuggingFaceCase, effort: Effort) -> list[Row]:
        part = {} if self.options.optimizer_step else {"part": "forward and backward"}
        return [{**row, **part} for row in super().measure(run, number, case, effort)]
