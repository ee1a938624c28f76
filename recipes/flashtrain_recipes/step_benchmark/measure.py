"""One case measured: every implementation makes its first steps at every batch, then all take turns in rounds.

All models stay on the device with their optimiser states, and each gives its gradients back after its turn. Where a
batch does not fit beside the others' models, those wait in main memory while it has its turn.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from flashtrain.announce import say
from flashtrain_recipes.benchmark_runner.measuring import (
    FEWEST_ROUNDS,
    OUT_OF_MEMORY,
    Clock,
    Effort,
    Note,
    Row,
    first_line,
    in_turn,
)
from flashtrain_recipes.step_benchmark.training_step import Contender, MemoryChoice, TrainingStep

NO_TIME, FAILED, MISSING = "no time left", "failed", "not available"
_TURN_SECONDS = 2.0  # a turn has fewer steps than asked for rather than take longer
# Of a step that is measured at its second call, and once more: minutes tell nothing that these do not.
_SLOW_SECONDS = 20.0


class MeasuredCase(Protocol):
    """What is measured: a StepCase, or another kind of model. model: its name; context: tokens a sample; weights: the
    precision they are held in. draw: (samples, labels) on a device, the same for equal seeds. flops_per_token: of
    forward and backward."""

    @property
    def model(self) -> str: ...

    @property
    def context(self) -> int: ...

    @property
    def weights(self) -> str: ...

    def draw(self, batch: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]: ...

    def flops_per_token(self) -> float: ...


@dataclass
class _Runner:
    """A built model. held_mib: what its weights and optimiser states hold on the device; None where unknown."""

    contender: Contender
    step: TrainingStep
    held_mib: float | None = None
    is_away: bool = False


@dataclass
class _Entry:
    """One implementation at one batch. milliseconds: of a step, a turn each. alone: the others must make room.

    failed: it has no further turns. first_seconds: of its first step, compilation included. seconds: of its second,
    about what a step takes.
    """

    runner: _Runner
    tokens: Tensor
    labels: Tensor
    memory: MemoryChoice
    alone: bool = False
    failed: bool = False
    seconds: float = 0.0
    first_seconds: float = 0.0
    peak_mib: float | None = None
    milliseconds: list[float] = field(default_factory=list)

    @property
    def is_slow(self) -> bool:
        return self.seconds >= _SLOW_SECONDS

    def launch(self) -> Tensor:
        return self.runner.step(self.tokens, self.labels)


class StepMeasurement:
    """One case on one device; `run` gives a row for each implementation and batch.

    note(title, reason): told of what could not be measured. full: implementations (by name) that are known to run out
    of memory here, with the words for it: they are not tried. expected: seconds that implementations (by name) are
    expected to take for their first steps, where a similar case told.
    """

    def __init__(
        self,
        case: MeasuredCase,
        device: torch.device,
        clock: Clock,
        *,
        seed: int,
        note: Note,
        peak_flops: float | None = None,
        full: dict[str, str] | None = None,
        expected: dict[str, float] | None = None,
    ) -> None:
        self.case, self.device, self.clock, self.note, self.seed = case, device, clock, note, seed
        self.peak_flops = peak_flops
        self.full, self.expected = dict(full or {}), dict(expected or {})
        self._runners: dict[tuple[str, str], _Runner] = {}
        self._entries: list[_Entry] = []
        self._without: list[Row] = []
        self._longest_start = {True: 0.0, False: 0.0}  # seconds, of what is compiled and of what is not

    def run(self, contenders: Sequence[Contender], batches: Sequence[int], effort: Effort) -> list[Row]:
        """The rows, those without figures last; their status says why."""
        began = time.monotonic()
        for place, batch in enumerate(sorted(set(batches))):
            limit = effort.until
            if place and effort.seconds is not None:  # one batch of each is tried as long as there is any time
                limit = min(began + effort.seconds, math.inf if limit is None else limit)
            for contender in contenders:
                self._try(contender, batch, limit)
        self._take_turns(effort, began)
        rows = [self._row(entry) for entry in self._entries if entry.milliseconds]
        return rows + self._without

    # ---------------------------------------------------------------- first steps
    def _try(self, contender: Contender, batch: int, limit: float | None) -> None:
        """Make an entry of the implementation at this batch, or a row that says why there is none."""
        missing = contender.missing(self.device)
        if missing is not None:
            if not any(row["implementation"] == contender.title for row in self._without):
                self._leave_out(contender, None, MISSING, missing)
            return
        if contender.name in self.full and not contender.adapts:
            self._leave_out(contender, batch, OUT_OF_MEMORY, self.full[contender.name])
            return
        # the rounds need their time too
        start = max(self._longest_start[contender.compiled], self.expected.get(contender.name, 0.0))
        reserve = start + FEWEST_ROUNDS * sum(entry.seconds for entry in self._entries)
        if limit is not None and time.monotonic() + reserve >= limit:
            self._leave_out(contender, batch, NO_TIME, "benchmark.max_seconds leave no time for it")
            return
        began = time.monotonic()
        failure = self._guarded(partial(self._start, contender, batch, alone=False))
        others = [runner for runner in self._runners.values() if runner.contender is not contender]
        away = contender.shares or all(runner.is_away for runner in others)
        if failure == OUT_OF_MEMORY and not away:
            self._discard_unused(contender)
            failure = self._guarded(partial(self._start, contender, batch, alone=True))
        took = time.monotonic() - began
        self._longest_start[contender.compiled] = max(self._longest_start[contender.compiled], took)
        if failure is None:
            return
        self._discard_unused(contender)
        if failure == OUT_OF_MEMORY:
            self._leave_out(contender, batch, OUT_OF_MEMORY, None)
            self.full[contender.name] = f"not tried: a batch of {batch} ran out of memory already"
        else:
            self._leave_out(contender, batch, FAILED, failure)

    def _start(self, contender: Contender, batch: int, *, alone: bool) -> None:
        """The first two steps: compilation, then memory and about how long a step takes."""
        memory = contender.memory(self.case, batch)
        key = (contender.name, memory.words)
        if alone:
            self._send_away(except_for=self._runners.get(key))
        before = 0.0 if contender.shares else self.clock.held_mib()
        runner = self._runners.get(key)
        is_new = runner is None
        if runner is None:
            runner = _Runner(contender, contender.build(self.case, batch, self.device))
            self._runners[key] = runner
        entry = _Entry(runner, *self.case.draw(batch, self.device, self.seed), memory, alone)
        self._bring_back(runner)
        began = time.perf_counter()
        loss = float(entry.launch())
        entry.first_seconds = time.perf_counter() - began
        runner.step.drop_gradients()
        held = self.clock.held_mib()
        if is_new and held is not None and before is not None:
            runner.held_mib = held - before
        began = time.perf_counter()
        peak = self.clock.peak_mib(entry.launch)
        entry.seconds = time.perf_counter() - began
        runner.step.drop_gradients()
        if peak is not None:
            entry.peak_mib = peak + (runner.held_mib or 0.0)
        if entry.is_slow:
            entry.milliseconds.append(entry.seconds * 1e3)
        if not math.isfinite(loss):
            raise ArithmeticError(f"the first loss is {loss}")
        self._entries.append(entry)
        say(f"    {contender.title}, batch {batch}: ready after {entry.first_seconds + entry.seconds:.0f} s")

    def _discard_unused(self, contender: Contender) -> None:
        """Let go of models that no entry uses, and of what failed steps left behind."""
        for key, runner in list(self._runners.items()):
            if runner.contender is contender and all(entry.runner is not runner for entry in self._entries):
                del self._runners[key]
        self.clock.release()

    # ---------------------------------------------------------------- turns
    def _take_turns(self, effort: Effort, began: float) -> None:
        """Rounds in which every entry has one turn; who begins moves on by one a round."""
        if self._entries:
            say(f"    timing {len(self._entries)}{' that take turns' if len(self._entries) > 1 else ''}")
        for number in range(effort.rounds):
            if effort.is_late(began) and (number >= FEWEST_ROUNDS or self._is_over(effort)):
                break
            for entry in in_turn(self._entries, number):
                if entry.failed:
                    continue
                if entry.is_slow and (number > 0 or self._is_over(effort, ahead=entry.seconds)):
                    continue
                self._turn(entry, effort.steps)

    def _is_over(self, effort: Effort, ahead: float = 0.0) -> bool:
        """Whether the time is over and every entry has a figure, so that nothing is lost by ending."""
        return effort.is_over(ahead) and all(entry.milliseconds or entry.failed for entry in self._entries)

    def _turn(self, entry: _Entry, steps: int) -> None:
        failure = self._guarded(partial(self._timed, entry, steps))
        if failure == OUT_OF_MEMORY and not entry.alone:
            entry.alone = True
            failure = self._guarded(partial(self._timed, entry, steps))
        if failure is not None:
            status = OUT_OF_MEMORY if failure == OUT_OF_MEMORY else FAILED
            if not entry.milliseconds:
                contender = entry.runner.contender
                self._leave_out(contender, len(entry.tokens), status, None if status == failure else failure)
            entry.failed = True

    def _timed(self, entry: _Entry, steps: int) -> None:
        if entry.alone:
            self._send_away(except_for=entry.runner)
        self._bring_back(entry.runner)
        if not entry.is_slow:
            entry.launch()  # untimed: the device's caches and the allocator are another implementation's
        fitting = max(1, round(_TURN_SECONDS / entry.seconds)) if entry.seconds else steps
        count = 1 if entry.is_slow else min(steps, fitting)
        entry.milliseconds.append(self.clock.steps(entry.launch, count))
        entry.runner.step.drop_gradients()

    # ---------------------------------------------------------------- room on the device
    def _send_away(self, except_for: _Runner | None) -> None:
        for runner in self._runners.values():
            if runner is not except_for and not runner.is_away and not runner.contender.shares:
                runner.step.move(torch.device("cpu"))
                runner.is_away = True
        self.clock.release()

    def _bring_back(self, runner: _Runner) -> None:
        if runner.is_away:
            runner.step.move(self.device)
            runner.is_away = False

    def _guarded(self, do: Callable[[], object]) -> str | None:
        """None where it worked, else what happened in a line. A broken GPU ends the run."""
        try:
            do()
            return None
        except torch.OutOfMemoryError:
            failure = OUT_OF_MEMORY
        except Exception as error:  # noqa: BLE001 - other people's models may raise anything; the others go on
            failure = OUT_OF_MEMORY if _is_out_of_memory(error) else first_line(error)
        for runner in self._runners.values():
            runner.step.drop_gradients()
        self.clock.release()
        self.clock.check()
        return failure

    # ---------------------------------------------------------------- rows
    def _leave_out(self, contender: Contender, batch: int | None, status: str, reason: str | None) -> None:
        at = "" if batch is None else f" at batch {batch}"
        self.note(contender.title, status + at + ("" if reason is None else f": {reason}"))
        row = case_columns(contender.title, self.case, batch)
        empty = dict.fromkeys(("tokens_per_second", "mfu", "peak_memory_gib", "milliseconds", "compile_seconds"))
        self._without.append({**row, **empty, "status": status, **({"error": reason} if reason else {})})

    def _row(self, entry: _Entry) -> Row:
        batch = len(entry.tokens)
        milliseconds = statistics.median(entry.milliseconds)
        compiling = max(0.0, entry.first_seconds - milliseconds / 1e3) if entry.runner.contender.compiled else 0.0
        row: Row = {
            **case_columns(entry.runner.contender.title, self.case, batch),
            **rates(self.case, batch, milliseconds, self.peak_flops),
            "peak_memory_gib": None if entry.peak_mib is None else round(entry.peak_mib / 1024, 3),
            "milliseconds": round(milliseconds, 3),
            "compile_seconds": round(compiling, 1),
            "turns": len(entry.milliseconds),
        }
        if entry.memory.words:
            row["memory"] = entry.memory.words
        if entry.memory.estimate_gib is not None and entry.peak_mib is not None:
            row["memory_estimate_gib"] = entry.memory.estimate_gib
        return row


def case_columns(title: str, case: MeasuredCase, batch: int | None) -> Row:
    """What every row of an implementation begins with."""
    told = {"implementation": title, "model": case.model, "context": case.context}
    return {**told, "batch": batch, "weights": case.weights}


def rates(case: MeasuredCase, batch: int, milliseconds: float, peak_flops: float | None) -> dict[str, Any]:
    """tokens_per_second and mfu (of the device's dense peak in FLOP/s; None where that is unknown) of such a step."""
    tokens_per_second = batch * case.context / milliseconds * 1e3
    mfu = None if peak_flops is None else round(tokens_per_second * case.flops_per_token() / peak_flops, 4)
    return {"tokens_per_second": round(tokens_per_second, 1), "mfu": mfu}


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an error of another type tells of memory: compilers and libraries wrap torch's own."""
    words = f"{type(error).__name__} {error}".lower()
    return "out of memory" in words or "outofmemory" in words
