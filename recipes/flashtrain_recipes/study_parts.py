"""A study of several commands, its parts: trainings, and scores of what was trained.

What is finished in the study's folder is not done again; an interrupted part goes on.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flashtrain.announce import say
from flashtrain.folders.new_folder import locked
from flashtrain.folders.run_folder import (
    FAILED,
    FINISHED,
    RUNNING,
    STOPPED,
    read_summary,
    write_config,
    write_summary,
)
from flashtrain.report.rows import RESULT, Row, command_line, read_result, write_result
from flashtrain.run.job import write_report
from flashtrain.run.machine import adapt_to_machine
from flashtrain.run.train import planned_row
from flashtrain.settings.command_line import CommandLine, quoted
from flashtrain.settings.settings import Settings
from flashtrain_recipes.context_study import ENDED, Start, study_folder


@dataclass(frozen=True)
class Part:
    """One command of the study."""

    name: str
    words: list[str]
    run: Path  # its run folder or, of a score, the folder that its result is in or below
    series: str = ""  # of a score
    mode: str = ""
    given: frozenset[str] = frozenset()  # settings that a score's command must have

    def rows(self) -> list[Row]:
        """The rows of a score's result; of RULER the means. Empty until all are there."""
        for path in sorted(self.run.glob(f"**/{self.mode}*/{RESULT}")):
            found = read_result(path)
            if self.given <= {*shlex.split(found.command)}:
                rows = [row for row in found.rows if row.get("task", "mean") == "mean"]
                if rows:  # RULER's means are written last
                    return [{"part": self.mode, **row, "series": self.series} for row in rows]
        return []

    def is_done(self) -> bool:
        """Whether its results are there."""
        return bool(self.rows() if self.mode else read_summary(self.run).get("status") == FINISHED)


def run_parts(
    settings: Settings,
    line: CommandLine,
    *,
    parts: Callable[[Settings, CommandLine, Path], Iterable[Part]],
    compare: Callable[[Sequence[Part], Path], tuple[list[Row], Row]],
    started: float,
    start: Start,
) -> int:
    """Run what is left of a study, and return its exit status.

    Args:
        line: the command line.
        parts: returns the study's commands in order, of its folder.
        compare: shows the finished parts' results, and returns the rows and more columns of the
            summary.
        started: time.monotonic() at the command's start.
        start: runs a part, given its command line, and returns its exit status.
    """
    settings, hardware = adapt_to_machine(settings, line)
    folder = study_folder(settings, line)
    with locked(folder):
        write_config(asdict(settings), folder)
        planned = planned_row(settings, hardware, line)
        write_summary(folder, {**planned, "status": RUNNING})
        whole = list(parts(settings, line, folder))
        for part in whole:
            if part.is_done():
                say(f"\n=== {part.name}: done already")
                continue
            say(f"\n=== {part.name}: {command_line(part.words)}")
            status = start(list(part.words))
            if status or not part.is_done():  # trainer.max_minutes ends with 0
                ended = not status or status in ENDED
                why = "stopped" if ended else "failed"
                end = {"status": STOPPED if ended else FAILED, "error": f"{part.name} {why}"}
                write_summary(folder, {**planned, **end})
                say(f"{part.name} {why}. Repeat the command with resume={folder} to go on.")
                return status
        rows, more = compare(whole, folder)
        write_result(folder / RESULT, settings.recipe, command_line(line), rows)
        row = {**planned, "status": FINISHED, **more}
        row["seconds"] = round(time.monotonic() - started, 1)
        write_report(folder, row)
        write_summary(folder, row)
    return 0


def training_part(name: str, words: Sequence[str], run: Path) -> Part:
    return Part(name, with_words(words, f"hydra.run.dir={quoted(str(run))}"), run)


def with_words(words: Sequence[str], *new: str) -> list[str]:
    """The words with new ones, each in place of one of the same setting."""
    return [*without(words, [_setting(word) for word in new]), *new]


def only(words: Sequence[str], names: Sequence[str]) -> list[str]:
    return [word for word in words if _is_of(word, names)]


def without(words: Sequence[str], names: Sequence[str]) -> list[str]:
    return [word for word in words if not _is_of(word, names)]


def _is_of(word: str, names: Sequence[str]) -> bool:
    own = _setting(word)
    return any(own == name or own.startswith(f"{name}.") for name in names)


def _setting(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]
