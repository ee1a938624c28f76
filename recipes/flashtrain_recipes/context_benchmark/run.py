"""recipe=long-context-benchmark: time attention over several devices, by every
method in every layout."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from typing import Any

from flashtrain.errors import UserError
from flashtrain.files.disk import write_atomically
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.context_benchmark import states
from flashtrain_recipes.context_benchmark.baseline import ContextBaseline
from flashtrain_recipes.context_benchmark.baselines import (
    flashtrain,
    plain_all_gather,
    torch_context_parallel,
)
from flashtrain_recipes.context_benchmark.cases import ContextCase, cases
from flashtrain_recipes.context_benchmark.launch import Job, launched
from flashtrain_recipes.context_benchmark.rows import extrapolated
from flashtrain_recipes.harness.benchmark import Benchmark
from flashtrain_recipes.harness.rows import Row
from flashtrain_recipes.harness.run_folder import Run

MIN_CPU_RANKS = 4  # processes may be more than cores: slow, but what a test needs


class ContextBenchmark(Benchmark):
    """The benchmark of attention over several devices: every requested degree,
    shape, mask and length.

    The ranks of a degree measure all of its cases, and send their rows to this process.
    """

    what = "attention over several devices"
    columns = (
        "mask", "degree", "heads", "kv_heads", "head_dim", "seqlen", "implementation", "forward_ms",
        "backward_ms",
        "one_device_ms", "one_device", "efficiency", "tflops_per_device", "communication_share",
        "sent_mib",
        "imbalance", "peak_memory_gib", "error_ratio",
    )  # fmt: skip
    rate = "tflops_per_device"

    def __init__(self, settings: Settings, hardware: Hardware) -> None:
        self.degrees = degrees_of(settings, hardware)
        super().__init__(settings, hardware)

    def make_cases(self) -> list[ContextCase]:
        if self.options.mixers is None:
            return cases(self.options, self.degrees)
        sizes = cases(replace(self.options, masks=["full"]), self.degrees)
        return [
            states.StateCase(one.attention, one.degree, mixer)
            for one in sizes
            for mixer in self.options.mixers
        ]

    def make_baselines(self) -> list[ContextBaseline]:
        if self.options.mixers is not None:
            layouts = self.options.layouts
            return [one for one in states.BASELINES if layouts is None or one.layout in layouts]
        ours = flashtrain.baselines(self.options.methods, self.options.layouts)
        # torch has no context parallelism of attention on a CPU
        torchs = torch_context_parallel.BASELINES if self.hardware.kind == "cuda" else ()
        return [*ours, *plain_all_gather.BASELINES, *torchs]

    def plan_line(self, case: ContextCase) -> str:
        refused = [
            f"; without {one.title} ({reason})"
            for one in self.baselines
            if (reason := one.refuses(case))
        ]
        return f"{case}{''.join(refused)}"

    def measure_all(self, run: Run) -> int:
        begun, kind, seed = 0, self.hardware.kind, self.settings.seed
        for degree in self.degrees:
            todo = {number: case for number, case in enumerate(self.cases) if case.degree == degree}
            if min(todo) and time.monotonic() >= run.until:
                break
            job = Job(self.options, kind, todo, self.baselines, seed, len(self.cases), run.until)
            with closing(launched(job)) as events:
                for event in events:
                    case = self.cases[event.number]
                    if event.kind == "failed":
                        write_atomically(run.folder / f"case-{event.number}.txt", event.content)
                    elif event.kind == "measured":
                        rows, notes = event.content
                        for title, reason in notes:
                            run.note(str(case), title, reason)
                        self.end_case(
                            run, [extrapolated(row, case, run.rows, self.cases) for row in rows]
                        )
                    elif event.number >= begun:
                        self.begin_case(event.number)
                        begun = event.number + 1
        return begun

    def without(self, case: Any, baseline: Any, status: str, reason: str) -> list[Row]:
        return []


def degrees_of(settings: Settings, hardware: Hardware) -> list[int]:
    """Return benchmark.degrees, the numbers of devices that a sequence is sharded over, ascending;
    by default those of 2, 4 and 8 that this machine has.

    Raises:
        UserError: a degree is below 2 or above the number of devices.
    """
    largest = hardware.count if hardware.kind == "cuda" else max(hardware.count, MIN_CPU_RANKS)
    possible = range(2, largest + 1)
    degrees = sorted(
        set(settings.benchmark.degrees or [one for one in (2, 4, 8) if one in possible])
    )
    if not degrees or not set(degrees) <= set(possible):
        raise UserError(
            f"benchmark.degrees={degrees}: each must be at least 2, and at most {largest}, the "
            "number of devices of this machine."
        )
    return degrees
