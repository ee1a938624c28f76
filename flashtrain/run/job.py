"""One job in its folder, from its lock to its summary row: however it ends,
summary.json has a row about it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flashtrain.announce import is_first_rank, log, say
from flashtrain.errors import RunFailed, UserError, causes, first_line
from flashtrain.folders.new_folder import locked, made_here, resumed_folder, run_folder
from flashtrain.folders.run_folder import (
    CONFIG_FILE,
    FAILED,
    OUT_OF_MEMORY,
    RUNNING,
    STOPPED,
    as_begun,
    note_failure,
    read_summary,
    words_of_run,
    write_summary,
)
from flashtrain.folders.run_lock import is_first_of_job
from flashtrain.interruption import Interrupted, Stopped
from flashtrain.mode import mode_of
from flashtrain.run.failures import LOG, NOTED
from flashtrain.run.machine import adapt_to_machine
from flashtrain.run.train import planned_row, train
from flashtrain.settings.command_line import FOLDER, CommandLine
from flashtrain.settings.settings import Settings
from flashtrain.spec import task_of
from flashtrain.training.hardware import Hardware
from flashtrain.training.killed_ranks import name_killed_ranks
from flashtrain.training.out_of_memory import OutOfMemory


@dataclass
class Job:
    """A run with its folder, settings and hardware, ready to start."""

    settings: Settings  # as adapted to the machine
    hardware: Hardware
    folder: Path
    line: CommandLine
    # To `say` first, once a log has them too.
    lines: list[tuple[Any, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, settings: Settings, line: CommandLine) -> Job:
        """Adapt composed settings to this machine, and then find or make the run's folder. Raises
        UserError if either is impossible."""
        lines: list[tuple[Any, ...]] = []
        settings, hardware = adapt_to_machine(settings, line, report=lambda *one: lines.append(one))
        return cls(settings, hardware, run_folder(settings, line), line, lines)

    def run(self, *, started: float) -> dict[str, Any]:
        """Train, measure or preview, and return the summary row, which summary.json
        also has after a failure.

        The folder is locked meanwhile. `started` is when the command began, as time.monotonic().

        Raises:
            UserError: the user can correct the cause (OutOfMemory is one), or another
                process uses the folder.
            RunFailed: the run failed otherwise.
            Stopped: a signal came, or trainer.max_minutes are over.
            Interrupted: a signal came outside of training steps, or a second Ctrl-C.
        """
        with locked(self.folder), _logged(self.folder):
            for one in self.lines:
                say(*one)
            return self._run_locked(started)

    def _run_locked(self, started: float) -> dict[str, Any]:
        settings, hardware, folder = self.settings, self.hardware, self.folder
        name_killed_ranks(partial(note_failure, folder))
        resumed = resumed_folder(settings, folder)
        words: Sequence[str] = self.line
        if resumed is not None and (resumed / CONFIG_FILE).is_file():
            settings = as_begun(settings, resumed, self.line.by_name)
            if "recipe" not in self.line.by_name:
                words = words_of_run(resumed, words)

        def note(status: str, error: str, steps: int | None = None) -> None:
            # A run that could not be continued, for a mistake in the command, keeps the row
            # that it had. Whichever rank fails says so: the first one may wait for it, and be
            # ended by the launcher.
            if (status != STOPPED or is_first_rank()) and read_summary(folder).get(
                "status", RUNNING
            ) == RUNNING:
                with contextlib.suppress(OSError):  # a full disk takes no row either
                    row = {
                        **planned_row(settings, hardware, words),
                        "status": status,
                        "error": error,
                    }
                    if steps is not None:  # in place of those that were planned
                        counts = {"steps", "tokens", "samples"} & row.keys()
                        row |= {name: row[name] * steps // row["steps"] for name in counts}
                    write_report(folder, row)
                    write_summary(folder, row)

        try:
            mode = mode_of(settings)
            do = partial(train, task_of(settings)) if mode is None else mode.run
            row = do(settings, hardware, folder, overrides=words, started=started)
        except (UserError, RunFailed) as error:
            # Of a refused command nothing stays, unless another process reads its folder.
            own = (".lock", "flashtrain")  # logs and locks, which begin so
            begun = any(not path.name.startswith(own) for path in folder.iterdir())
            others = not made_here(folder) and (is_first_rank() or FOLDER in self.line.by_name)
            if type(error) is not UserError or begun or others:
                note(OUT_OF_MEMORY if isinstance(error, OutOfMemory) else FAILED, str(error))
            raise
        except Stopped as stop:
            say(str(stop))
            note(STOPPED, str(stop), stop.steps)
            _leave_ranks()
            raise
        except (KeyboardInterrupt, SystemExit) as error:
            # Lightning's Trainer makes the latter of the former.
            ended = next(
                (one for one in causes(error) if isinstance(one, Interrupted)),
                Interrupted(signal.SIGINT),
            )
            # Else the run has not begun, and its folder is removed.
            if (folder / CONFIG_FILE).exists():
                note(STOPPED, str(ended))
            raise ended from None
        except torch.OutOfMemoryError as error:
            line = (
                f"out of memory: {first_line(error)}. Try memory.activation_checkpointing=full, "
                "a smaller trainer.micro_batch or context."
            )
            note(OUT_OF_MEMORY, line)
            raise OutOfMemory(line) from error
        except Exception as error:
            note(FAILED, f"{type(error).__name__}: {error}")
            raise
        if is_first_rank():
            write_report(folder, row)
            write_summary(folder, row)
            if settings.mode == "train":
                task_of(settings).report(row, folder, settings)
        _leave_ranks()
        return row


def write_report(folder: Path, row: dict[str, Any] | None = None) -> None:
    """Write the folder's report.html; if that fails, print a line. `row`: the summary row, if
    summary.json is not written yet."""
    from flashtrain.report.page import write_page

    try:
        write_page(folder, row)
    except Exception as problem:  # noqa: BLE001 - as said
        say(f"no report.html: {first_line(problem)}")


@contextlib.contextmanager
def _logged(folder: Path) -> Iterator[None]:
    """Context manager: copy printed lines to flashtrain.log, with the time, and the traceback of an
    exception that ends the `with` block."""
    # A rank that is not the first has a file of its own, for the traceback alone.
    rank = next(
        (os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ),
        "0",
    )
    path = folder / (LOG if is_first_of_job() else f"flashtrain-rank-{rank}.log")
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(), *([] if log.propagate else [log])] if is_first_of_job() else []
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        traced = (
            None
            if isinstance(error, UserError | Stopped)
            else (type(error), error, error.__traceback__)
        )
        line = str(error) or type(error).__name__
        if loggers or traced is not None:
            handler.handle(
                logging.LogRecord(log.name, logging.ERROR, __file__, 0, "%s", (line,), traced)
            )
            setattr(error, NOTED, path)
        raise
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()


def _leave_ranks() -> None:
    """Destroy torch's process groups while every rank still runs: a process that exits with them is
    aborted by gloo's threads."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
