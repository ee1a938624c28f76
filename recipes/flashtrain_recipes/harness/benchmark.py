"""A run of any benchmark: it measures case after case until the time limit, and saves,
prints and draws the rows."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from flashtrain.announce import say
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import FINISHED, OUT_OF_MEMORY
from flashtrain.report.rows import RESULT, Row, Rows, values_of
from flashtrain.report.table import make_table
from flashtrain.run.train import planned_row
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain.training.loggers import log_image, log_summary, log_table
from flashtrain_recipes.harness.baseline import Baseline, choose
from flashtrain_recipes.harness.clock import Clock, clock_for
from flashtrain_recipes.harness.rows import MISSING, NO_TIME, Over, case_line, empty_row
from flashtrain_recipes.harness.run_folder import EVERY_CASE, Run, begun
from flashtrain_recipes.harness.turns import Effort, Turns


class Benchmark(ABC):
    """Base class of all benchmarks: measures every case by every baseline on this machine.

    A subclass defines the cases, the baselines and the columns of the table.
    """

    what: ClassVar[str]  # the measured thing in words, for printed lines and the table's title
    columns: ClassVar[Sequence[str]]  # of the printed table; a column without values is left out
    rate: ClassVar[str]  # the column that is printed after each case
    # Columns that compare rows with each other, computed when all are measured.
    over: ClassVar[Sequence[Over]] = ()
    # file names, and functions that draw the files, or raise UserError where the rows have no curve
    drawings: ClassVar[Sequence[tuple[str, Callable[[Rows, Path], object]]]] = ()

    def __init__(self, settings: Settings, hardware: Hardware) -> None:
        self.settings, self.hardware, self.options = settings, hardware, settings.benchmark
        self.cases: Sequence[Any] = self.make_cases()
        device = torch.device("cuda" if hardware.kind == "cuda" else "cpu")
        # That can run on this machine; missing: {one that cannot: the reason}
        self.baselines: Sequence[Any]
        self.baselines, self.missing = choose(
            self.make_baselines(), self.options.implementations, device
        )

    # ---------------------------------------------------------------- what a family says
    @abstractmethod
    def make_cases(self) -> Sequence[Any]:
        """Return the cases that the settings select. Raises UserError for settings that
        select none or are invalid."""

    @abstractmethod
    def make_baselines(self) -> Sequence[Baseline]:
        """Return one instance of every baseline, in the order of the tables."""

    def turns(self, case: Any, **common: Any) -> Turns[Any, Any]:
        """Return the object that measures one case.

        Args:
            common: keyword arguments of the Turns constructor, passed on unchanged.
        """
        raise NotImplementedError

    def plan_line(self, case: Any) -> str:
        """Return the line that mode=plan prints for a case."""
        return str(case)

    def around(self, case: Any) -> AbstractContextManager[object]:
        """Return the context manager under which a case is measured; by default it does nothing."""
        return nullcontext()

    def without(self, case: Any, baseline: Any, status: str, reason: str) -> list[Row]:
        """Return the rows that say why a baseline was not measured; case=None: it
        cannot run on this machine."""
        return [empty_row(baseline.columns(case), status, reason)]

    def completed(self, rows: list[Row]) -> list[Row]:
        """Return the rows of the whole run as they are published: with the columns `over`, which
        compare each row with others, added."""
        return [
            {
                **row,
                **{key: value for over in self.over for key, value in over.of(row, rows).items()},
            }
            for row in rows
        ]

    # ---------------------------------------------------------------- the same for all
    @cached_property
    def device(self) -> torch.device:
        """The torch device that this process measures on."""
        on_gpu = self.hardware.kind == "cuda"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    @cached_property
    def clock(self) -> Clock:
        """The clock that times calls on `device`."""
        return clock_for(self.device)

    def line(self) -> str:
        """Return one line that says how much is measured, on which hardware and
        by which baselines."""
        limit = (
            "" if self.options.max_seconds is None else f", at most {self.options.max_seconds:g} s"
        )
        names = "; ".join(one.title for one in self.baselines) or "nothing"
        cases, rounds = len(self.cases), self.options.rounds
        return (
            f"{self.what}: {cases} cases, {rounds} rounds{limit}, on {self.hardware.name}: {names}"
        )

    def plan(self) -> str:
        """Return the text of mode=plan: the cases and baselines that would be measured."""
        lines = [
            self.line(),
            *[f"  left out: {one.title}, {reason}" for one, reason in self.missing.items()],
        ]
        lines += [f"  {self.plan_line(case)}" for case in self.cases]
        return "\n".join([*lines, "nothing was started; leave out mode=plan to measure."])

    def run(self, folder: Path, *, overrides: Sequence[str], started: float) -> dict[str, Any]:
        """Run the benchmark, write its files into `folder`, and return the summary row.

        Args:
            overrides: the command line's words.
            started: time.monotonic() at the command's start, from which
                benchmark.max_seconds counts.

        Raises:
            Stopped: after Ctrl-C or SIGTERM; result.json has the rows until then.
        """
        say(self.line())
        planned = planned_row(self.settings, self.hardware, overrides)
        with begun(self.settings, folder, planned, overrides, started) as run:
            for one, reason in self.missing.items():
                run.note(EVERY_CASE, one.title, reason)
            measured = self.measure_all(run)
            self._give_up(run, self.cases[measured:])
            run.rows = self.completed(run.rows)
            run.save()
            self._show(run, measured)
            counts = {"rows": len(run.rows), "notes": len(run.notes)}
            cases = {"cases": len(self.cases), "cases_measured": measured}
            seconds = {"seconds": round(time.monotonic() - started, 1)}
            row = {**planned, "status": FINISHED, **counts, **cases, **seconds}
            log_summary(run.loggers, row)
            return row

    def measure_all(self, run: Run) -> int:
        """Measure the cases, which share the time until the limit equally, and
        return how many were begun."""
        for number, case in enumerate(self.cases):
            left = run.seconds_left
            if left <= 0:
                return number
            self.begin_case(number)
            share = left / (len(self.cases) - number)
            effort = Effort(
                self.options.rounds, self.options.steps, time.monotonic() + share, run.until
            )
            self.end_case(run, self.measure(run, number, case, effort))
        return len(self.cases)

    def begin_case(self, number: int) -> None:
        """Print the line that announces case `number`, counted from 0."""
        say(f"[{number + 1}/{len(self.cases)}] {self.cases[number]}")

    def end_case(self, run: Run, rows: list[Row]) -> None:
        """Add a case's rows to the run, save all rows, and print the case's rates."""
        run.rows += rows
        run.save()
        say(f"    {case_line(rows, self.rate)}")

    def measure(self, run: Run, number: int, case: Any, effort: Effort) -> list[Row]:
        """Measure case `number` by all baselines, and return its rows; where its inputs do
        not fit into memory, every row's status is OUT_OF_MEMORY."""
        common = {
            "device": self.device,
            "clock": self.clock,
            "effort": effort,
            "note": partial(run.note, str(case)),
        }
        try:
            with self.around(case):
                turns = self.turns(case, seed=self.settings.seed + number, **common)
                rows = turns.run(self.baselines)
                del turns
        except torch.OutOfMemoryError:
            run.note(str(case), "the inputs", OUT_OF_MEMORY)
            rows = self._without_all(case, OUT_OF_MEMORY, "the inputs")
        gc.collect()  # models and their compiled graphs refer to each other
        self.clock.free_cache()
        return rows

    def _give_up(self, run: Run, cases: Sequence[Any]) -> None:
        for case in cases:
            reason = f"the limit benchmark.max_seconds={self.options.max_seconds:g} was reached"
            run.note(str(case), "not measured", reason)
            run.rows += self._without_all(case, NO_TIME, reason)
        for one, reason in self.missing.items():
            run.rows += self.without(None, one, MISSING, reason)

    def _without_all(self, case: Any, status: str, reason: str) -> list[Row]:
        return [row for one in self.baselines for row in self.without(case, one, status, reason)]

    def _show(self, run: Run, measured: int) -> None:
        """Print the table of the rows, draw the figures and log both."""
        if not any(row.get(self.rate) is not None for row in run.rows):
            say("nothing could be measured: notes.txt says why.")
            return
        columns = [key for key in self.columns if values_of(run.rows, key)]
        make_table(run.rows, columns, self.what).print()
        log_table(run.loggers, "rows", run.rows)
        for name, draw in self.drawings:
            path = run.folder / name
            try:
                draw(run.rows, path)
            except UserError:  # these rows have no curve
                continue
            log_image(run.loggers, path.stem, path)
        say(
            f"saved {len(run.rows)} rows, from {measured} of {len(self.cases)} cases, "
            f"in {run.folder / RESULT}"
        )
        say(
            "  publish them: "
            f"python -m flashtrain.report {run.folder} --save recipes/results/NAME.json"
        )
