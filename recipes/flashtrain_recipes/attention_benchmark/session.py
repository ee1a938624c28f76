"""The frame of a run that measures: its folder, its loggers, and rows that are on disk as soon as they are known.

runs/RECIPE/2026-11-21_10-15-02/
  config.yaml, summary.json, metrics.csv    as every run
  result.json                               all rows so far, in the form of recipes/results
  notes.txt                                 what could not be measured, and why
"""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from pytorch_lightning.loggers import Logger

from flashtrain.announce import say
from flashtrain.files.disk import write_atomically
from flashtrain.report.rows import RESULT, write_result
from flashtrain.report.table import Table
from flashtrain.run.fitting import Stopped, run_loggers
from flashtrain.run.run_folder import FINISHED, RUNNING, write_config, write_summary
from flashtrain.run.summary import planned_row
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain.training.loggers import close_loggers, log_image, log_summary, log_table
from flashtrain_recipes.attention_benchmark.measure import Row

NOTES = "notes.txt"
EVERY_ROW = "every row"


@dataclass
class Results:
    """Everything found so far, kept on disk. notes: {(implementation, reason): cases}."""

    folder: Path
    recipe: str
    command: str
    rows: list[Row] = field(default_factory=list)
    notes: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def note(self, case: str, title: str, reason: str) -> None:
        """Keep why an implementation has no figure for a case; each reason is said once, notes.txt has every case."""
        known = (title, reason) in self.notes
        self.notes.setdefault((title, reason), []).append(case)
        if not known:
            say(f"    {title}: {reason}")

    def save(self) -> None:
        """Write result.json and notes.txt."""
        if self.rows:
            write_result(self.folder / RESULT, self.recipe, self.command, self.rows)
        if self.notes:
            lines = [f"{title}: {reason} [{'; '.join(where)}]" for (title, reason), where in self.notes.items()]
            write_atomically(self.folder / NOTES, "\n".join(lines) + "\n")

    def say_end(self, measured: int, wanted: int) -> None:
        """Print what is missing and why, where the rows are, and how to publish them."""
        for (title, reason), where in self.notes.items():
            told = f"{title}: {reason}"
            say(told if where == [EVERY_ROW] else f"{told} ({len(where)} of {wanted} cases)")
        say(f"{len(self.rows)} rows of {measured} of {wanted} cases in {self.folder / RESULT}")
        say(f"  publish them: python -m flashtrain.report {self.folder} --save recipes/results/NAME.json")


@dataclass
class Session:
    """A run under way. until: the moment of time.monotonic() when benchmark.max_seconds are over; None: no limit."""

    results: Results
    loggers: list[Logger]
    planned: dict[str, Any]
    until: float | None
    _started: float

    def seconds_left(self) -> float | None:
        """Seconds until nothing new may begin; None without a limit."""
        return None if self.until is None else self.until - time.monotonic()

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Give numbers to every logger, at once."""
        for logger in self.loggers:
            logger.log_metrics(metrics, step=step)
            logger.save()

    def report(
        self,
        tables: Callable[[Sequence[Row]], list[Table]],
        figures: Callable[[Results], Iterator[tuple[str, Path]]],
        measured: int,
        wanted: int,
    ) -> None:
        """Print the tables of the rows, draw the figures (names and files), log both; say what of `wanted` is there."""
        results = self.results
        if not results.rows:
            say("nothing could be measured: notes.txt says why.")
            return
        for table in tables(results.rows):
            table.print()
        log_table(self.loggers, "rows", results.rows)
        for name, path in figures(results):
            log_image(self.loggers, name, path)
        results.say_end(measured, wanted)

    def finish(self, found: dict[str, Any]) -> dict[str, Any]:
        """The summary row of the finished run: what was planned, what was found, how long it took."""
        seconds = round(time.time() - self._started, 1)
        counts = {"rows": len(self.results.rows), "notes": len(self.results.notes)}
        row = {**self.planned, "status": FINISHED, **counts, **found, "seconds": seconds}
        log_summary(self.loggers, row)
        return row


class _Ended(BaseException):
    """A signal came. Not an Exception: nothing that guards an implementation may swallow it."""


@contextmanager
def session(
    settings: Settings, hardware: Hardware, folder: Path, *, overrides: list[str], started: float
) -> Iterator[Session]:
    """Begin a run in `folder`; however the block ends, its rows are saved and its loggers closed.

    started: time.time() at the command's start, from which benchmark.max_seconds counts. Raises Stopped after Ctrl-C
    or SIGTERM; the rows until then are in result.json.
    """
    limit = settings.benchmark.max_seconds
    # monotonic time, which measurements count in
    until = None if limit is None else time.monotonic() + limit - (time.time() - started)
    write_config(settings, folder)
    planned = planned_row(settings, hardware, overrides)
    write_summary(folder, {**planned, "status": RUNNING})
    results = Results(folder, settings.recipe, _command(overrides))
    loggers = run_loggers(settings, folder)
    try:
        with _signals():
            yield Session(results, loggers, planned, until, started)
    except _Ended as end:
        number = signal.Signals(end.args[0])
        raise Stopped(
            f"stopped by {number.name}: {len(results.rows)} rows are in {folder / RESULT}.", 128 + number
        ) from end
    finally:
        results.save()
        for logger in loggers:
            logger.finalize("success")
        close_loggers(loggers)


def _command(overrides: Sequence[str]) -> str:
    """What reproduces the run, without where it wrote and whom it told."""
    words = [word for word in overrides if not word.lstrip("+~").startswith(("output", "logger", "hydra"))]
    return " ".join(["python -m flashtrain", *[shlex.quote(word) for word in words]])


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
