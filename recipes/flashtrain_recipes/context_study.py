"""mode=lengths: train at each of lengths.contexts, each in its own process,
and compare the results.

runs/RECIPE/2026-11-21_10-15-02/
  context-1024/, context-2048/, ...   the trainings, each a run folder like any other
  config.yaml, summary.json           as every run
  result.json                         the rows, in the form of recipes/results
  *.png                               the study's figures

A context that has finished in the folder is not trained again; an interrupted one
resumes from its checkpoint.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashtrain.announce import say
from flashtrain.command.sweep import note_failure
from flashtrain.errors import UserError
from flashtrain.folders.new_folder import locked, new_run_folder
from flashtrain.folders.run_folder import (
    CONFIG_FILE,
    FAILED,
    FINISHED,
    OUT_OF_MEMORY,
    RUNNING,
    STOPPED,
    read_summary,
    write_config,
    write_summary,
)
from flashtrain.folders.same_training import find_same, newest_first
from flashtrain.interruption import ENDING
from flashtrain.registry import component
from flashtrain.report.rows import RESULT, Row, command_line, has_failed, write_result
from flashtrain.run.job import write_report
from flashtrain.run.job_process import JobProcesses
from flashtrain.run.machine import adapt_to_machine
from flashtrain.run.train import planned_row
from flashtrain.settings.command_line import FOLDER, CommandLine, quoted
from flashtrain.settings.settings import Settings
from flashtrain.spec import Plan, task_of
from flashtrain.training.hardware import Hardware

# Settings of the comparison's command line that are not passed on to a training.
NOT_FOR_TRAINING = ("mode", "resume", "data.split_context", "hydra.run.dir", "logger.group")

ENDED = [128 + number for number in ENDING]

Start = Callable[[list[str]], int]


def start_training(words: list[str]) -> int:
    """Run `python -m flashtrain WORDS` in a process, and return its exit status, 128 + N
    where signal N ended it.

    A signal that ends this command is passed on to the process, which is waited for: it
    writes its checkpoint.
    """
    with JobProcesses() as processes:
        status = processes.run(words)
    return status if processes.stopped_by is None else 128 + processes.stopped_by


def run_study(
    settings: Settings, overrides: CommandLine, *, started: float, start: Start = start_training
) -> int:
    """Run the comparison of contexts for the settings' task, and return its exit status
    (ContextStudy.run).

    Args:
        overrides: the command line.
        started: time.monotonic() at the command's start.
        start: runs one training, given its command line, and returns its exit status.

    Raises:
        UserError: the settings are invalid; nothing has been trained.
    """
    settings, hardware = adapt_to_machine(settings, overrides)
    study: ContextStudy = component("study", settings.task)(settings, hardware, overrides)
    return study.run(started=started, start=start)


def study_folder(settings: Settings, line: CommandLine) -> Path:
    """Return the study's folder: that of resume= or of Hydra, the newest unfinished one of the same
    settings for resume=auto, else a new one."""
    parent, words = Path(settings.output) / settings.recipe, line.by_name
    named = words[FOLDER].value() if FOLDER in words else settings.resume
    if named is None:
        return new_run_folder(parent)
    if named != "auto":
        given = Path(str(named)).expanduser()
        begins = FOLDER in words and not (given / CONFIG_FILE).is_file()
        if not begins and find_same([given], settings) is None:
            raise UserError(
                f"{given} is no comparison of these settings: "
                "expected resume=auto, or resume= with the folder of one."
            )
        return given
    found = find_same(newest_first(parent), settings, take=True)
    if found is None:
        return new_run_folder(parent)
    say(
        f"going on with {found}: "
        "what is finished there is not trained again (resume=null starts anew)."
    )
    return found


def study_plan(settings: Settings, hardware: Hardware) -> Plan:
    """Return the text of mode=plan: the plan of the training at each context."""
    task, contexts = task_of(settings), sorted(settings.lengths.contexts or [])
    plans = [task.plan(settings.having(context=context), hardware) for context in contexts]
    texts = (f"=== context {one:,}\n{plan}" for one, plan in zip(contexts, plans, strict=True))
    return Plan("\n".join(texts), sum(getattr(plan, "seconds", 0) for plan in plans))


class ContextStudy(ABC):
    """Base class of comparisons of contexts.

    Raises:
        UserError: the command line sets `context`, or the settings cannot be trained.
    """

    # Columns of summary.json that differ between the trainings.
    many_values: tuple[str, ...] = ("context",)
    words: Sequence[str] = ()  # settings that are added to every training's command line

    def __init__(self, settings: Settings, hardware: Hardware, overrides: CommandLine) -> None:
        self.settings, self.hardware, self.overrides = settings, hardware, overrides
        self.contexts = sorted(settings.lengths.contexts or [])
        if "context" in overrides.by_name:
            raise UserError(
                f"context is not used: recipe={settings.recipe} trains every context of "
                f"lengths.contexts={list(settings.lengths.contexts or [])}. Change "
                "lengths.contexts, or add mode=train to train one context."
            )

    @abstractmethod
    def rows(self, folder: Path) -> list[Row]:
        """Return the result rows of every context that was trained in the folder,
        also by earlier commands."""

    @abstractmethod
    def show(self, rows: list[Row], folder: Path) -> list[Path]:
        """Print the table, draw figures into the folder, and return their paths, the main
        one first; [] if none."""

    @abstractmethod
    def best(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return the columns of summary.json that have the best score of all rows."""

    def run(self, *, started: float, start: Start) -> int:
        """Train the contexts that have not finished, score all, and return the exit
        status: 0 unless one failed.

        Running out of memory is a result, not a failure.

        Args:
            started: time.monotonic() at the command's start.
            start: runs one training, given its command line, and returns its exit status.
        """
        folder = study_folder(self.settings, self.overrides)
        with locked(folder):
            write_config(asdict(self.settings), folder)
            planned = planned_row(self.settings, self.hardware, self.overrides)
            planned.update(
                dict.fromkeys(self.many_values), contexts=" ".join(map(str, self.contexts))
            )
            write_summary(folder, {**planned, "status": RUNNING})
            say(
                "comparing contexts "
                f"{', '.join(f'{context:,}' for context in self.contexts)} in {folder}"
            )
            for context in self.contexts:
                status = self._train(context, folder, start)
                if status in ENDED:
                    again = (
                        f"with resume=auto or resume={folder} to continue at context {context:,}."
                    )
                    say(f"stopped. Repeat the same command {again}")
                    error = f"stopped by {signal.Signals(status - 128).name}"
                    write_summary(folder, {**planned, "status": STOPPED, "error": error})
                    return status
            rows = self.rows(folder)
            write_result(folder / RESULT, self.settings.recipe, self._command(rows), rows)
            self._report(folder, rows)
            failed = [row for row in rows if has_failed(row) and row.get("status") != OUT_OF_MEMORY]
            row = {
                **planned,
                "status": FINISHED,
                **self.best(rows),
                "seconds": round(time.monotonic() - started, 1),
            }
            for first in failed[:1]:
                error = f"context {first['context']}: {first.get('error') or 'failed'}"
                row |= {"status": FAILED, "error": error}
            write_report(folder, row)
            write_summary(folder, row)
            return 1 if failed else 0

    def _train(self, context: int, folder: Path, start: Start) -> int:
        run = run_of(folder, context)
        if read_summary(run).get("status") == FINISHED:
            say(f"\n=== context {context:,}: trained already")
            return 0
        say(f"\n=== context {context:,}")
        run.mkdir(exist_ok=True)
        own = (*(f"{key}=" for key in NOT_FOR_TRAINING), "lengths.")
        words = [word for word in self.overrides if not word.lstrip("+~").startswith(own)]
        group = self.settings.logger.group or f"{self.settings.recipe}-{folder.name}"
        words += [
            "mode=train",
            f"context={context}",
            "resume=auto",
            f"logger.group={quoted(group)}",
        ]
        words += [f"hydra.run.dir={quoted(str(run))}", *self.words]
        status = start(words)
        note_failure(run, words, status)
        return status

    def _report(self, folder: Path, rows: list[Row]) -> None:
        figures = self.show(rows, folder)
        if not figures:
            say("nothing could be scored: no training finished.")
            return
        say(f"figures: {', '.join(map(str, figures))}; the result's rows are in {folder / RESULT}")
        say(
            f"  publish them: python -m flashtrain.report {folder} --save recipes/results/NAME.json"
        )

    def _command(self, rows: Sequence[Row]) -> str:
        # what reproduces the rows, whichever commands trained them, without
        # where it wrote and logged
        contexts = sorted({row["context"] for row in rows})
        words = list(self.overrides)
        if contexts != self.contexts:
            words = [word for word in words if not word.startswith("lengths.contexts=")]
            words.append(f"lengths.contexts=[{','.join(map(str, contexts))}]")
        return command_line(words, without=("output", "logger", "hydra", "resume"))


def run_of(folder: Path, context: int) -> Path:
    """Return the run folder of one context, inside the comparison's folder."""
    return folder / f"context-{context}"


def trained_contexts(folder: Path) -> list[int]:
    """Return the contexts that have a run folder inside the comparison's folder, ascending."""
    found = [
        path.name.removeprefix("context-") for path in folder.glob("context-*") if path.is_dir()
    ]
    return sorted(int(name) for name in found if name.isdigit())
