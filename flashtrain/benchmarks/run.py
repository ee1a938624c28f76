"""A whole benchmark: its cases one after the other, every row on disk as soon as it is known.

runs/attention-benchmark/2026-11-21_10-15-02/
  config.yaml, summary.json, metrics.csv    as every run
  result.json                               all rows so far, in the form of recipes/results
  notes.txt                                 what could not be measured, and why
  runtime.png, memory.png, ...              the paper's figures, where there are several lengths of a shape
"""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from flashtrain.announce import say
from flashtrain.benchmarks.case import Case
from flashtrain.benchmarks.clock import clock_for
from flashtrain.benchmarks.figures import families, memory_figure, runtime_figure
from flashtrain.benchmarks.measure import Effort, Measurement, Row
from flashtrain.benchmarks.peers import Peer, choose_peers
from flashtrain.benchmarks.presets import cases
from flashtrain.benchmarks.tables import case_line, tables
from flashtrain.report.rows import RESULT, values_of, write_atomically, write_result
from flashtrain.run import Stopped
from flashtrain.run_folder import FINISHED, RUNNING, write_config, write_summary
from flashtrain.settings import Settings
from flashtrain.summary import planned_row
from flashtrain.training.hardware import Hardware
from flashtrain.training.loggers import close_loggers, log_image, log_summary, log_table, make_loggers

NOTES = "notes.txt"


@dataclass
class _Results:
    """Everything found so far, kept on disk. notes: {(implementation, reason): cases}."""

    folder: Path
    recipe: str
    command: str
    rows: list[Row] = field(default_factory=list)
    notes: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def note(self, case: str, title: str, reason: str) -> None:
        known = (title, reason) in self.notes
        self.notes.setdefault((title, reason), []).append(case)
        if not known:  # once is enough on the screen; notes.txt has every case
            say(f"    {title}: {reason}")

    def save(self) -> None:
        if self.rows:
            write_result(self.folder / RESULT, self.recipe, self.command, self.rows)
        if self.notes:
            lines = [f"{title}: {reason} [{'; '.join(where)}]" for (title, reason), where in self.notes.items()]
            write_atomically(self.folder / NOTES, "\n".join(lines) + "\n")


class _Ended(BaseException):
    """A signal came. Not an Exception: nothing that guards an implementation may swallow it."""


def benchmark(
    settings: Settings, hardware: Hardware, folder: Path, *, overrides: list[str], started: float
) -> dict[str, Any]:
    """Measure what the settings name, in `folder`, and return the summary row.

    started: time.time() at the command's start, from which benchmark.max_seconds counts. Raises UserError for what the
    user can mend, Stopped after a signal; the rows until then are in result.json.
    """
    asked = settings.benchmark
    device = torch.device("cuda", torch.cuda.current_device()) if hardware.kind == "cuda" else torch.device("cpu")
    todo = cases(asked)
    peers, missing = choose_peers(asked.implementations, device)
    say(describe(settings, hardware, todo, peers))
    write_config(settings, folder)
    planned = planned_row(settings, hardware, overrides)
    write_summary(folder, {**planned, "status": RUNNING})
    results = _Results(folder, settings.recipe, _command(overrides))
    for title, reason in missing.items():
        results.note("every row", title, reason)
    loggers = make_loggers(
        settings.logger.name,
        folder,
        project=settings.logger.project,
        name=settings.logger.run_name or f"{settings.recipe}-{folder.name}",
        group=settings.logger.group,
        config=asdict(settings),
        mode=settings.logger.mode,
    )
    try:
        with _signals():
            measured = _measure_all(settings, device, todo, peers, results, loggers, started)
        row = {
            **planned,
            "status": FINISHED,
            "cases": len(todo),
            "cases_measured": measured,
            "rows": len(results.rows),
            "notes": len(results.notes),
            **_best(results.rows),
            "seconds": round(time.time() - started, 1),
        }
        _report(results, loggers, measured, len(todo))
        log_summary(loggers, row)
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
    return row


def describe(settings: Settings, hardware: Hardware, todo: Sequence[Case], peers: Sequence[Peer]) -> str:
    """The line that says what is about to be measured, on what."""
    asked = settings.benchmark
    limit = "" if asked.max_seconds is None else f", at most {asked.max_seconds:g} s"
    names = "; ".join(peer.title for peer in peers) or "nothing"
    return (
        f"attention benchmark: {len(todo)} cases (benchmark.rows={asked.rows}), {asked.dtype}, "
        f"{'+'.join(asked.directions)}, up to {asked.rounds} rounds{limit}, on {hardware.name}: {names}"
    )


def benchmark_plan(settings: Settings, hardware: Hardware) -> str:
    """mode=plan: the cases and the implementations, and nothing started."""
    device = torch.device("cuda" if hardware.kind == "cuda" else "cpu")
    todo = cases(settings.benchmark)
    peers, missing = choose_peers(settings.benchmark.implementations, device)
    lines = [describe(settings, hardware, todo, peers)]
    lines += [f"  left out: {title}, {reason}" for title, reason in missing.items()]
    lines += [f"  {case}" for case in todo]
    return "\n".join([*lines, "nothing was started; leave out mode=plan to measure."])


def _measure_all(
    settings: Settings,
    device: torch.device,
    todo: Sequence[Case],
    peers: Sequence[Peer],
    results: _Results,
    loggers: Sequence[Any],
    started: float,
) -> int:
    """Measure case by case; returns how many were begun. What is left of the time is shared by the cases left."""
    asked = settings.benchmark
    clock = clock_for(device)
    # monotonic time, which Effort counts in
    until = None if asked.max_seconds is None else time.monotonic() + asked.max_seconds - (time.time() - started)
    for number, case in enumerate(todo):
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            for missed in todo[number:]:
                results.note(str(missed), "not measured", f"benchmark.max_seconds={asked.max_seconds:g} were over")
            return number
        say(f"[{number + 1}/{len(todo)}] {case}")
        rows: list[Row] = []
        try:
            measurement = Measurement(
                case,
                device,
                clock,
                seed=settings.seed + number,
                directions=asked.directions,
                note=partial(results.note, str(case)),
            )
            share = None if left is None else left / (len(todo) - number)
            rows = measurement.run(peers, Effort(asked.rounds, share, until), check=asked.reference)
            del measurement
        except torch.OutOfMemoryError:
            results.note(str(case), "the inputs", "out of memory")
        clock.release()
        results.rows += rows
        results.save()
        say(f"    {case_line(rows)}")
        for logger in loggers:
            logger.log_metrics(_metrics(rows), step=number)
            logger.save()
    return len(todo)


def _report(results: _Results, loggers: list[Any], measured: int, wanted: int) -> None:
    """Print the tables, draw the figures, and log both."""
    if not results.rows:
        say("nothing could be measured: notes.txt says why.")
        return
    for table in tables(results.rows):
        table.print()
    log_table(loggers, "rows", results.rows)
    if families(results.rows):
        for draw, name in ((runtime_figure, "runtime"), (memory_figure, "memory")):
            if name == "runtime" or values_of(results.rows, "peak_memory_mib"):
                log_image(loggers, name, draw(results.rows, results.folder / f"{name}.png"))
    for (title, reason), where in results.notes.items():
        say(f"{title}: {reason} ({len(where)} of {wanted} cases)" if where != ["every row"] else f"{title}: {reason}")
    say(f"{len(results.rows)} rows of {measured} of {wanted} cases in {results.folder / RESULT}")
    say(f"  publish them: python -m flashtrain.report {results.folder} --save recipes/results/NAME.json")


def _metrics(rows: Sequence[Row]) -> dict[str, float]:
    """A case's TFLOP/s by implementation and direction, for the loggers."""
    return {
        f"tflops/{row['direction']}/{row['implementation']}": row["tflops"]
        for row in rows
        if row.get("tflops") is not None
    }


def _best(rows: Sequence[Row]) -> dict[str, float]:
    """The summary's figures: our fastest row in each direction, in TFLOP/s."""
    ours = [row for row in rows if row["implementation"] == "flashtrain" and row.get("tflops") is not None]
    return {
        f"tflops_{direction}": max(row["tflops"] for row in ours if row["direction"] == direction)
        for direction in ("forward", "backward")
        if any(row["direction"] == direction for row in ours)
    }


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
