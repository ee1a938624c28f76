"""The folder of a benchmark's run, which is complete also when the run is stopped:

runs/RECIPE/2026-11-21_10-15-02/
  config.yaml, summary.json  as every run
  result.json                all rows so far, in the form of recipes/results
  notes.txt                  what could not be measured, and why
  *.png                      the benchmark's figures, where several lengths were measured
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger

from flashtrain.announce import say
from flashtrain.files.disk import write_atomically
from flashtrain.folders.run_folder import RUNNING, write_config, write_summary
from flashtrain.interruption import Interrupted, Stopped, handle, interrupt, restore
from flashtrain.report.rows import RESULT, command_line, write_result
from flashtrain.run.fitting import run_loggers
from flashtrain.settings.settings import Settings
from flashtrain.training.loggers import close_loggers
from flashtrain_recipes.harness.rows import Row

NOTES = "notes.txt"
EVERY_CASE = "every case"


@dataclass
class Run:
    """A benchmark's run in progress: its folder and loggers, and the rows and notes so far."""

    folder: Path
    recipe: str
    overrides: Sequence[str]  # the command line's settings
    loggers: list[Logger]
    until: float = math.inf  # the time.monotonic() after which no measurement is begun
    rows: list[Row] = field(default_factory=list)
    # {(baseline, reason): cases}
    notes: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    @property
    def seconds_left(self) -> float:
        """Seconds until no further measurement is begun; infinite without benchmark.max_seconds."""
        return self.until - time.monotonic()

    def note(self, case: str, title: str, reason: str) -> None:
        """Record why a baseline was not measured at a case. Each reason is printed once;
        notes.txt lists every case."""
        known = (title, reason) in self.notes
        self.notes.setdefault((title, reason), []).append(case)
        if not known:
            say(f"    {title}: {reason}")

    def save(self) -> None:
        """Write result.json and notes.txt into the folder."""
        if self.rows:
            command = command_line(self.overrides, without=("output", "logger", "hydra"))
            write_result(self.folder / RESULT, self.recipe, command, self.rows)
        if self.notes:
            lines = [
                f"{title}: {reason} [{'; '.join(cases)}]"
                for (title, reason), cases in self.notes.items()
            ]
            write_atomically(self.folder / NOTES, "\n".join(lines) + "\n")


@contextmanager
def begun(
    settings: Settings,
    folder: Path,
    planned: dict[str, Any],
    overrides: Sequence[str],
    started: float,
) -> Iterator[Run]:
    """Begin a run in `folder`; when the `with` block ends, for any reason, save its rows
    and close its loggers.

    Args:
        planned: the columns of summary.json that are known before measuring.
        started: time.monotonic() at the command's start, from which benchmark.max_seconds counts.

    Raises:
        Stopped: the process received Ctrl-C, SIGTERM or SIGHUP.
    """
    limit = settings.benchmark.max_seconds
    until = math.inf if limit is None else started + limit
    write_config(asdict(settings), folder)
    write_summary(folder, {**planned, "status": RUNNING})
    run = Run(folder, settings.recipe, overrides, run_loggers(settings, folder), until)
    before = handle(interrupt)  # which, as Ctrl-C does, passes what guards a baseline
    try:
        yield run
    except KeyboardInterrupt as end:
        status = end.status if isinstance(end, Interrupted) else 128 + signal.SIGINT
        raise Stopped(f"stopped: {len(run.rows)} rows are in {folder / RESULT}.", status) from end
    finally:
        restore(before)
        run.save()
        for logger in run.loggers:
            logger.finalize("success")
        close_loggers(run.loggers)
