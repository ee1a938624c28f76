"""A run of any benchmark: case after case while there is time, rows on disk as soon as they are known, then
what they show.

runs/RECIPE/2026-11-21_10-15-02/
  config.yaml, summary.json, metrics.jsonl  as every run
  result.json                               all rows so far, in the form of recipes/results
  notes.txt                                 what could not be measured, and why
  *.png                                     the benchmark's own figures, where several lengths were measured
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from pytorch_lightning.loggers import Logger

from flashtrain.announce import say
from flashtrain.files.disk import write_atomically
from flashtrain.folders.run_folder import FINISHED, RUNNING, write_config, write_summary
from flashtrain.report.rows import RESULT, command_line, write_result
from flashtrain.report.table import Table
from flashtrain.run.fitting import Stopped, run_loggers
from flashtrain.run.train import planned_row
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain.training.loggers import close_loggers, log_image, log_summary, log_table
from flashtrain_recipes.benchmark_runner.measuring import Clock, Effort, Event, Row, clock_for

NOTES = "notes.txt"
EVERY_ROW = "every row"


@dataclass
class Run:
    """A run under way: everything found so far, kept on disk. overrides: the command line's.

    until: the moment of time.monotonic() when benchmark.max_seconds are over; None: no limit. notes: {(implementation,
    reason): cases}.
    """

    folder: Path
    recipe: str
    overrides: Sequence[str]
    loggers: list[Logger]
    until: float | None
    rows: list[Row] = field(default_factory=list)
    notes: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def seconds_left(self) -> float | None:
        """Seconds until nothing new may begin; None without a limit."""
        return None if self.until is None else self.until - time.monotonic()

    def note(self, case: str, title: str, reason: str) -> None:
        """Keep why an implementation has no figure for a case; each reason is said once, notes.txt has every case."""
        known = (title, reason) in self.notes
        self.notes.setdefault((title, reason), []).append(case)
        if not known:
            say(f"    {title}: {reason}")

    def save(self) -> None:
        """Write result.json and notes.txt."""
        if self.rows:
            command = command_line(self.overrides, without=("output", "logger", "hydra"))
            write_result(self.folder / RESULT, self.recipe, command, self.rows)
        if self.notes:
            lines = [f"{title}: {reason} [{'; '.join(where)}]" for (title, reason), where in self.notes.items()]
            write_atomically(self.folder / NOTES, "\n".join(lines) + "\n")

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Give numbers to every logger, at once."""
        for logger in self.loggers:
            logger.log_metrics(metrics, step=step)
            logger.save()

    def say_end(self, measured: int, wanted: int) -> None:
        """Print what is missing and why, where the rows are, and how to publish them."""
        for (title, reason), where in self.notes.items():
            told = f"{title}: {reason}"
            say(told if where == [EVERY_ROW] else f"{told} ({len(where)} of {wanted} cases)")
        say(f"{len(self.rows)} rows of {measured} of {wanted} cases in {self.folder / RESULT}")
        say(f"  publish them: python -m flashtrain.report {self.folder} --save recipes/results/NAME.json")


class Benchmark(ABC):
    """What the settings name, measured on this machine. A subclass says what is measured and how one case is.

    todo: the cases, in the order of measuring. missing: {title of each implementation that cannot be had here: why}.
    Raises UserError, when it is made, for what the user can mend.
    """

    todo: Sequence[Any]
    missing: Mapping[str, str] = {}

    def __init__(self, settings: Settings, hardware: Hardware) -> None:
        self.settings, self.hardware, self.asked = settings, hardware, settings.benchmark

    # ---------------------------------------------------------------- what a benchmark says of itself
    @abstractmethod
    def line(self) -> str:
        """What is about to be measured, on what."""

    def measure(self, number: int, effort: Effort, run: Run) -> list[Row]:
        """The rows of one case, by its number, for `events`. What could not be measured is noted in the run."""
        raise NotImplementedError

    @abstractmethod
    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """What is printed at the end, of one row at least."""

    @abstractmethod
    def told(self, rows: Sequence[Row]) -> str:
        """One case's rows in a line."""

    def case_line(self, case: Any) -> str:
        """A case, as it is said when it begins."""
        return str(case)

    def plan_line(self, case: Any) -> str:
        """A case, as mode=plan lists it."""
        return self.case_line(case)

    def plan_lines(self) -> list[str]:
        """Every case, as mode=plan lists them."""
        return [self.plan_line(case) for case in self.todo]

    def left_out(self) -> Mapping[str, str]:
        """Of mode=plan: {title of each implementation that is not measured: why}."""
        return self.missing

    def prepared(self) -> Sequence[Any]:
        """The cases, ready to be measured: not called for mode=plan."""
        return self.todo

    def not_begun(self, case: Any) -> list[Row]:
        """The rows of a case for which no time was left."""
        return []

    def completed(self, run: Run) -> list[Row]:
        """The rows as they are published, when all cases were measured or given up."""
        return run.rows

    def metrics(self, rows: Sequence[Row]) -> dict[str, float] | None:
        """A case's figures for the loggers; None: none."""
        return None

    def figures(self, run: Run) -> Iterator[tuple[str, Path]]:
        """Draw the figures; their names and files."""
        yield from ()

    def log(self, run: Run) -> None:
        """Give the loggers that keep tables the rows."""
        log_table(run.loggers, "rows", run.rows)

    def best(self, rows: Sequence[Row]) -> dict[str, float]:
        """The summary's own figures."""
        return {}

    # ---------------------------------------------------------------- the same for all
    @cached_property
    def device(self) -> torch.device:
        on_gpu = self.hardware.kind == "cuda"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    @cached_property
    def clock(self) -> Clock:
        return clock_for(self.device)

    def limit(self) -> str:
        """benchmark.max_seconds for `line`; "" without."""
        return "" if self.asked.max_seconds is None else f", at most {self.asked.max_seconds:g} s"

    def plan(self) -> str:
        """mode=plan: what would be measured, and nothing started."""
        lines = [self.line(), *[f"  left out: {title}, {reason}" for title, reason in self.left_out().items()]]
        lines += [f"  {line}" for line in self.plan_lines()]
        return "\n".join([*lines, "nothing was started; leave out mode=plan to measure."])

    def run(self, folder: Path, *, overrides: list[str], started: float) -> dict[str, Any]:
        """Measure in `folder` and return the summary row.

        started: time.time() at the command's start, from which benchmark.max_seconds counts. Raises Stopped after
        Ctrl-C or SIGTERM; the rows until then are in result.json.
        """
        self.todo = self.prepared()
        say(self.line())
        planned = planned_row(self.settings, self.hardware, overrides)
        with _begun(self.settings, folder, planned, overrides, started) as run:
            for title, reason in self.missing.items():
                run.note(EVERY_ROW, title, reason)
            measured = self._follow(run)
            run.rows = self.completed(run)
            self._show(run, measured)
            counts = {"rows": len(run.rows), "notes": len(run.notes)}
            cases = {"cases": len(self.todo), "cases_measured": measured}
            seconds = {"seconds": round(time.time() - started, 1)}
            row = {**planned, "status": FINISHED, **counts, **cases, **self.best(run.rows), **seconds}
            log_summary(run.loggers, row)
            return row

    def events(self, run: Run) -> Generator[Event, None, None]:
        """Measure case by case while there is time. What is left of it is shared by the cases left."""
        for number in range(len(self.todo)):
            left = run.seconds_left()
            if left is not None and left <= 0:
                return
            yield Event("case", number)
            share = None if left is None else left / (len(self.todo) - number)
            effort = Effort(self.asked.rounds, self.asked.steps, share, run.until)
            yield Event("rows", number, self.measure(number, effort, run))

    def _follow(self, run: Run) -> int:
        """Keep and tell what the events say; returns how many cases were begun."""
        begun = 0
        with closing(self.events(run)) as events:
            for event in events:
                case = self.todo[event.case]
                begun = max(begun, event.case + 1)
                if event.kind == "case":
                    say(f"[{event.case + 1}/{len(self.todo)}] {self.case_line(case)}")
                elif event.kind == "note":
                    run.note(str(case), *event.told)
                else:
                    run.rows += event.told
                    run.save()
                    say(f"    {self.told(event.told)}")
                    metrics = self.metrics(event.told)
                    if metrics is not None:
                        run.log_metrics(metrics, step=event.case)
        for case in self.todo[begun:]:
            run.note(str(case), "not measured", f"benchmark.max_seconds={self.asked.max_seconds:g} were over")
            run.rows += self.not_begun(case)
        run.save()
        return begun

    def _show(self, run: Run, measured: int) -> None:
        """Print the tables of the rows, draw the figures, log both; say what of the cases is there."""
        if not run.rows:
            say("nothing could be measured: notes.txt says why.")
            return
        for table in self.tables(run.rows):
            table.print()
        self.log(run)
        for name, path in self.figures(run):
            log_image(run.loggers, name, path)
        run.say_end(measured, len(self.todo))


class _Ended(BaseException):
    """A signal came. Not an Exception: nothing that guards an implementation may swallow it."""


@contextmanager
def _begun(
    settings: Settings, folder: Path, planned: dict[str, Any], overrides: Sequence[str], started: float
) -> Iterator[Run]:
    """Begin a run in `folder`; however the block ends, its rows are saved and its loggers closed."""
    limit = settings.benchmark.max_seconds
    # monotonic time, which measurements count in
    until = None if limit is None else time.monotonic() + limit - (time.time() - started)
    write_config(settings, folder)
    write_summary(folder, {**planned, "status": RUNNING})
    run = Run(folder, settings.recipe, overrides, run_loggers(settings, folder), until)
    try:
        with _signals():
            yield run
    except _Ended as end:
        number = signal.Signals(end.args[0])
        raise Stopped(
            f"stopped by {number.name}: {len(run.rows)} rows are in {folder / RESULT}.", 128 + number
        ) from end
    finally:
        run.save()
        for logger in run.loggers:
            logger.finalize("success")
        close_loggers(run.loggers)


@contextmanager
def _signals() -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into _Ended, so that the rows found are saved and the row says so."""

    def end(number: int, _: FrameType | None) -> None:
        raise _Ended(number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
