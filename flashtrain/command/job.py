"""One job from settings to exit status: run it, and whatever happens leave a summary row that says what happened."""

from __future__ import annotations

import contextlib
import traceback
from functools import partial
from pathlib import Path

import torch

from flashtrain.announce import is_first_rank, log, quieten, say
from flashtrain.command.machine import settle
from flashtrain.errors import RunFailed, UserError
from flashtrain.files.disk import disk_line
from flashtrain.folders.run_folder import (
    FAILED,
    OUT_OF_MEMORY,
    RUNNING,
    STOPPED,
    note_failure,
    read_summary,
    write_summary,
)
from flashtrain.folders.run_lock import hold, let_go
from flashtrain.run.fitting import Stopped
from flashtrain.run.train import failed_row, train
from flashtrain.settings.settings import Settings
from flashtrain.spec import mode_of, task_of
from flashtrain.training.memory_choice import OutOfMemory
from flashtrain.training.signals import name_killed_ranks


def run_job(settings: Settings, folder: Path, *, overrides: list[str], started: float) -> int:
    """Train, measure or preview in `folder`. Returns the exit status: 0 finished, or ended at trainer.max_minutes, 1
    crashed, 2 a user's mistake, 3 out of memory, 130 or 143 stopped by a signal.

    The folder is held meanwhile: one in which another process runs is left as it is, with status 2."""
    quieten()
    try:
        hold(folder)
    except UserError as error:
        log.error("flashtrain: %s", error)
        return 2
    try:
        return _run_held(settings, folder, overrides=overrides, started=started)
    finally:
        let_go(folder)


def _run_held(settings: Settings, folder: Path, *, overrides: list[str], started: float) -> int:
    name_killed_ranks(partial(note_failure, folder))
    settings, hardware = settle(settings, overrides)

    def note(status: str, error: str) -> None:
        # A run that could not be continued, for a mistake in the command, keeps the row that it had.
        # Whichever rank fails says so: the first one may wait for it, and be ended by the launcher.
        if (status != STOPPED or is_first_rank()) and read_summary(folder).get("status", RUNNING) == RUNNING:
            with contextlib.suppress(UserError):  # a full disk takes no row either; what led here has been said
                write_summary(folder, failed_row(settings, hardware, overrides, status, error))

    try:
        mode = mode_of(settings)
        do = partial(train, task_of(settings)) if mode is None else mode.run
        row = do(settings, hardware, folder, overrides=overrides, started=started)
    except OutOfMemory as error:
        log.error("flashtrain: %s", error)
        note(OUT_OF_MEMORY, str(error))
        return 3
    except UserError as error:
        log.error("flashtrain: %s", error)
        note(FAILED, str(error))
        return 2
    except RunFailed as error:
        log.error("flashtrain: %s", error)
        note(FAILED, str(error))
        return 1
    except Stopped as stop:
        say(str(stop))
        note(STOPPED, str(stop))
        _leave_ranks()
        return stop.status
    except (KeyboardInterrupt, SystemExit):  # a second Ctrl-C, which does not wait for the step in progress
        note(STOPPED, "stopped at once by a second Ctrl-C; the last checkpoint is an earlier one")
        return 130
    except torch.OutOfMemoryError as error:
        line = f"out of memory: {str(error).splitlines()[0]} Try memory=full, a smaller trainer.micro_batch or context."
        log.error("flashtrain: %s", line)
        note(OUT_OF_MEMORY, line)
        return 3
    except Exception as error:  # noqa: BLE001 - the row must say so before the traceback is shown
        told = disk_line(error)
        if told is not None:
            log.error("flashtrain: %s", told)
            note(FAILED, told)
            return 2
        traceback.print_exc()
        note(FAILED, f"{type(error).__name__}: {error}")
        return 1
    if is_first_rank():
        write_summary(folder, row)
        if settings.mode == "train":
            task_of(settings).say(row, folder, settings)
    _leave_ranks()
    return 0


def _leave_ranks() -> None:
    """End the process groups while every rank is still there: gloo's threads abort a process that exits with them."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
