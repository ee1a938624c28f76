"""One case of training steps, measured by all baselines in turns.

All models stay on the device with their optimizer states, and each frees its gradients after its
turn. A baseline that does not fit next to the others is measured after them, alone.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashtrain.announce import say
from flashtrain.folders.run_folder import OUT_OF_MEMORY
from flashtrain_recipes.harness.rows import Row
from flashtrain_recipes.harness.turns import Entry, Sample, Turns
from flashtrain_recipes.step_benchmark.cases import StepCase
from flashtrain_recipes.step_benchmark.training_step import MemoryChoice, StepBaseline, TrainingStep

_STEP = "step"  # the one part of a turn
_TURN_SECONDS = 2.0  # a turn has fewer steps than requested rather than take longer
_MAX_SECONDS = 60.0  # of all turns but the first: minutes tell nothing that these do not


@dataclass(kw_only=True)
class StepEntry(Entry[StepBaseline]):
    """A baseline's model and batches. A launch makes one training step on each batch."""

    step: TrainingStep
    batches: Sequence[tuple[Any, ...]]
    memory: MemoryChoice
    first_seconds: float = 0.0  # of the first launch, compilation included
    seconds: float = 0.0  # of the second launch
    # Of weights, optimizer states and what a step needs beyond; None: unknown.
    peak_mib: float | None = None

    def launch(self) -> Tensor:
        return [self.step(*arguments) for arguments in self.batches][-1]


class StepTurns(Turns[StepCase, StepEntry]):
    """Measures one case of training steps.

    Args:
        peak_flops: the device's dense peak in FLOP/s, for MFU; None: unknown.
        full: (title of a baseline, case) pairs that ran out of memory; those of this case are
            added to the list. A baseline is not tried at a case that needs as much memory as one
            at which it ran out, unless it adapts to larger cases by saving more.
    """

    def __init__(
        self,
        case: StepCase,
        *,
        peak_flops: float | None,
        full: list[tuple[str, StepCase]],
        **common: Any,
    ) -> None:
        super().__init__(case, **common)
        self.peak_flops, self.full = peak_flops, full
        self._later: list[StepBaseline] = []

    def run(self, baselines: Sequence[StepBaseline]) -> list[Row]:
        rows = super().run(baselines)
        later, self._later = self._later, []
        for baseline in later:
            # The others' models make room, and what was compiled of them.
            self.entries, self.empty = [], []
            if any(one.compiled for one in baselines):
                torch.compiler.reset()
            gc.collect()
            self.clock.free_cache()
            rows += super().run([baseline])
        return rows

    def leave_out(self, baseline: StepBaseline, part: str, status: str, reason: str | None) -> None:
        others = [one for one in self.entries if one.baseline is not baseline]
        if status == OUT_OF_MEMORY and reason is None and others:
            self._later.append(baseline)
        else:
            self.full += [(baseline.title, self.case)] if status == OUT_OF_MEMORY else []
            super().leave_out(baseline, part, status, reason)

    def refuses(self, baseline: StepBaseline) -> tuple[str, str] | None:
        for title, other in self.full:
            if title == baseline.title and not baseline.adapts and self.case.needs_memory_of(other):
                full = f"a batch of {other.batch} x {other.context} ran out of memory already"
                return OUT_OF_MEMORY, f"not tried: {full}"
        return super().refuses(baseline)

    def start(self, baseline: StepBaseline) -> None:
        """Launch twice: once to compile, then for the peak memory and an
        estimate of a launch's time."""
        memory = baseline.memory(self.case)
        before = self.clock.allocated_mib()
        step = baseline.build(self.case, self.device)
        batches = baseline.batches(self.case, self.case.draw(self.device, self.seed), self.device)
        entry = StepEntry(baseline, {_STEP: []}, step=step, batches=batches, memory=memory)
        began = time.perf_counter()
        loss = float(entry.launch())
        entry.first_seconds = time.perf_counter() - began
        step.drop_gradients()
        after = self.clock.allocated_mib()
        began = time.perf_counter()
        peak = self.clock.peak_mib(entry.launch)
        entry.seconds = time.perf_counter() - began
        step.drop_gradients()
        if peak is not None and after is not None and before is not None:
            entry.peak_mib = peak + after - before
        if not math.isfinite(loss):
            raise ArithmeticError(f"the first loss is {loss}, expected a finite number")
        self.entries.append(entry)
        say(f"    {baseline.title}: ready after {entry.first_seconds + entry.seconds:.0f} s")

    def sample(self, entry: StepEntry, part: str, number: int) -> Sample | None:
        if number * entry.seconds > _MAX_SECONDS:
            return None
        self.clock.free_cache()  # what others have left would be searched, or block what fits
        entry.launch()  # untimed: the device's caches and the allocator are another baseline's
        count = max(1, min(self.effort.steps, round(_TURN_SECONDS / entry.seconds)))
        milliseconds = self.clock.waited([entry.launch], count)
        entry.step.drop_gradients()
        return {"milliseconds": milliseconds}

    def after_failure(self) -> None:
        for entry in self.entries:
            entry.step.drop_gradients()

    # ---------------------------------------------------------------- rows
    def rows_of(self, entry: StepEntry) -> list[Row]:
        milliseconds = entry.medians(_STEP)["milliseconds"]
        compiling = (
            max(0.0, entry.first_seconds - milliseconds / 1e3) if entry.baseline.compiled else 0.0
        )
        row: Row = {
            **entry.baseline.columns(self.case),
            **self.case.rates(milliseconds, entry.baseline.peak(self.case, self.peak_flops)),
            "peak_memory_gib": None if entry.peak_mib is None else round(entry.peak_mib / 1024, 3),
            "milliseconds": round(milliseconds, 3),
            "compile_seconds": round(compiling, 1),
            "turns": len(entry.samples[_STEP]),
        }
        if entry.memory.words:
            row["memory"] = entry.memory.words
        if entry.memory.estimate_gib is not None and entry.peak_mib is not None:
            row["memory_estimate_gib"] = entry.memory.estimate_gib
        return [row]
