"""The benchmarks of training steps: a base class for all models, and GPT-2's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.harness.benchmark import Benchmark
from flashtrain_recipes.harness.rows import NO_TIME, Row
from flashtrain_recipes.harness.run_folder import Run
from flashtrain_recipes.step_benchmark.baselines import FLASHTRAIN, all_baselines
from flashtrain_recipes.step_benchmark.cases import GPT2Case, StepCase, cases
from flashtrain_recipes.step_benchmark.command_cost import COMMAND, command_row
from flashtrain_recipes.step_benchmark.figures import (
    SPEEDUP,
    context_speed_figure,
    with_best_batches,
)
from flashtrain_recipes.step_benchmark.training_step import StepBaseline
from flashtrain_recipes.step_benchmark.turns import StepTurns

_RECOMPILATIONS = 64  # of one function: every baseline that shares it


class StepBenchmark(Benchmark):
    """Base class of benchmarks of training steps."""

    rate = "tokens_per_second"

    def __init__(self, settings: Settings, hardware: Hardware) -> None:
        super().__init__(settings, hardware)
        self.full: list[tuple[str, StepCase]] = []  # (title, case) that ran out of memory until now
        if not self.compiled:
            reason = "is compiled, on a CPU only with benchmark.compile=true"
            self.missing |= {one: reason for one in self.baselines if one.compiled}
            self.baselines = [one for one in self.baselines if not one.compiled]

    @property
    def compiled(self) -> bool:
        """Whether models that torch.compile can compile are compiled on this
        machine (benchmark.compile)."""
        requested = self.options.compile
        return bool(self.hardware.kind == "cuda" if requested is None else requested)

    @contextmanager
    def around(self, case: StepCase) -> Iterator[None]:
        """Raise torch.compile's limit of recompilations inside a `with` block, since many baselines
        compile the same functions, and clear its caches afterwards."""
        torch.set_float32_matmul_precision("high")  # as training does
        if not any(one.compiled for one in self.baselines):
            yield
            return
        from torch._dynamo import config  # seconds that nobody else needs to wait

        with config.patch(recompile_limit=_RECOMPILATIONS):
            try:
                yield
            finally:
                torch.compiler.reset()

    def turns(self, case: StepCase, **common: Any) -> StepTurns:
        return StepTurns(case, peak_flops=self.hardware.peak_flops, full=self.full, **common)


class GPT2Steps(StepBenchmark):
    """The benchmark of GPT-2 (recipe=gpt2-speed, context-speed): every model,
    context, batch and precision."""

    what = "training steps"
    columns: ClassVar[Sequence[str]] = (
        "model", "context", "weights", "implementation", "batch", "tokens_per_second", "mfu",
        "peak_memory_gib",
        "milliseconds", "compile_seconds", "speedup", "memory_estimate_gib", "memory",
        "paper_speedup", "command_cost",
        "status",
    )  # fmt: skip
    over = (SPEEDUP,)
    drawings = (("context.png", context_speed_figure),)

    def make_cases(self) -> list[GPT2Case]:
        return cases(self.settings)

    def make_baselines(self) -> list[StepBaseline]:
        return all_baselines(self.settings, self.hardware, compiled=self.compiled)

    def measure_all(self, run: Run) -> int:
        measured = super().measure_all(run)
        if self.options.command_steps:
            self._measure_command(run)
        return measured

    def completed(self, rows: list[Row]) -> list[Row]:
        return with_best_batches(super().completed(rows))

    def _measure_command(self, run: Run) -> None:
        """Add the row of `python -m flashtrain recipe=gpt2`, measured at the first model and
        context, with the batch at which flashtrain's step is fastest."""
        first = self.cases[0]
        same = [
            case for case in self.cases if (case.kind, case.context) == (first.kind, first.context)
        ]
        measured = [
            row for row in run.rows if row.get(self.rate) and row["implementation"] == FLASHTRAIN
        ]
        found = {
            case: row for case in same for row in measured if case.columns().items() <= row.items()
        }
        if not found or run.seconds_left <= 0:
            run.note(
                str(first),
                COMMAND,
                NO_TIME if found else "flashtrain has no figure to compare it with",
            )
            return
        case = max(found, key=lambda case: found[case][self.rate])
        self.clock.free_cache()
        run.rows.append(command_row(case, found[case], self, run))
