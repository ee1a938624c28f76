"""recipe=attention-benchmark: time attention by every baseline, forward and backward, and
draw both against length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashtrain.announce import say
from flashtrain_recipes.attention_benchmark.baselines import AttentionBaseline, all_baselines
from flashtrain_recipes.attention_benchmark.baselines.pytorch import Sdpa
from flashtrain_recipes.attention_benchmark.cases import Case, cases
from flashtrain_recipes.attention_benchmark.figures import lengths_figure
from flashtrain_recipes.attention_benchmark.turns import AttentionTurns, empty_rows
from flashtrain_recipes.attention_benchmark.warm import warm_up
from flashtrain_recipes.harness.benchmark import Benchmark
from flashtrain_recipes.harness.rows import Row
from flashtrain_recipes.harness.run_folder import Run

# The implementations of rows=as-called unless benchmark.implementations names others: what
# a program could call.
AS_CALLED = (
    "flashtrain", "flashtrain-planned", "flashtrain-compiled", "sdpa-flash", "sdpa-cudnn",
    "varlen-attn", "flash-attn",
    "flash-attn-3", "flash-attn-4",
)  # fmt: skip


class AttentionBenchmark(Benchmark):
    """The benchmark of attention: the cases of benchmark.rows, measured by the
    implementations in baselines/."""

    what, rate = "attention", "tflops"
    columns = (
        "batch", "heads", "kv_heads", "seqlen_q", "head_dim", "mask", "features", "dropout",
        "cache", "direction",
        "implementation", "tflops", "milliseconds", "host_us", "of_plain", "gb_per_second",
        "peak_memory_mib", "error",
        "status",
    )  # fmt: skip
    drawings = (("lengths.png", lengths_figure),)

    @property
    def as_called(self) -> bool:
        return self.options.rows == "as-called"

    def make_cases(self) -> Sequence[Case]:
        return cases(self.options)

    def make_baselines(self) -> Sequence[AttentionBaseline]:
        everyone = all_baselines(self.hardware.kind, matrices=not self.as_called)
        usual = self.as_called and self.options.implementations is None
        return [one for one in everyone if one.name in AS_CALLED] if usual else everyone

    def line(self) -> str:
        return f"{super().line()}; benchmark.rows={self.options.rows}, {self.options.dtype}"

    def measure_all(self, run: Run) -> int:
        """Measure the cases, and return how many were begun; with rows=as-called on a GPU, first
        compile the kernels of all cases in parallel processes."""
        seconds = min(self.options.warm_seconds, run.seconds_left / 2)
        if self.as_called and self.device.type == "cuda" and seconds > 0:
            say(
                "compiling the kernels of all cases beforehand, in parallel processes: "
                f"{seconds:.0f} s at most in all"
            )
            calls = [
                (case, one.name)
                for case in self.cases
                for one in self.baselines
                if not isinstance(one, Sdpa) and one.applies(case) and one.refuses(case) is None
            ]
            warm_up(calls, seconds)
        return super().measure_all(run)

    def turns(self, case: Case, **common: Any) -> AttentionTurns:
        return AttentionTurns(case, check=self.options.reference, **common)

    def without(
        self, case: Case | None, baseline: AttentionBaseline, status: str, reason: str
    ) -> list[Row]:
        """Return the rows that report a baseline as not measured at a case; case=None: it cannot
        run on this machine, which only benchmark.rows=as-called reports, in one row."""
        if case is not None:
            return empty_rows(case, baseline.title, status, reason)
        row = {
            "part": "missing",
            "implementation": baseline.title,
            "status": status,
            "error": reason,
        }
        return [row] if self.as_called else []
