"""The folder that a run begins in, which all ranks of a torchrun or SLURM job agree on."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
from torch.distributed import TCPStore

from flashtrain.announce import say
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import (
    CONFIG_FILE,
    FINISHED,
    LAST,
    SUMMARY_FILE,
    find_checkpoint,
    read_summary,
)
from flashtrain.folders.run_lock import hold, is_first_of_job, is_locked_by_job, let_go, slurm_job
from flashtrain.folders.same_training import find_unfinished, newest_first
from flashtrain.settings.command_line import FOLDER, CommandLine
from flashtrain.settings.settings import Settings
from flashtrain.spec import task_of

_SLURM_SECONDS = 600.0  # longest wait for the first rank of a SLURM job to take a folder

_made: set[Path] = set()  # the folders that this process made


def run_folder(settings: Settings, line: CommandLine) -> Path:
    """Return the run's folder: the one that the line names (hydra.run.dir), that of the run
    to resume, or a new one.

    All ranks of a torchrun or SLURM job get the same folder. With resume=auto it is the newest
    folder of an unfinished run that no process has locked, and this process locks it. `settings`
    must be adapted to the machine already.

    Raises UserError if there is no run to resume, or the named folder has a finished run.
    """
    given = line.by_name
    if FOLDER in given:
        folder = Path(str(given[FOLDER].value())).absolute()
        if (
            read_summary(folder).get("status") == FINISHED
            and resumed_folder(settings, folder) != folder
        ):
            raise UserError(
                f"{FOLDER}={folder} has a finished run. "
                "Use another folder, or resume=auto to continue it."
            )
        return folder
    parent = (Path(settings.output) / settings.recipe).absolute()
    if settings.resume != "auto":
        return resumed_folder(settings, parent) or new_run_folder(parent)

    def choose() -> Path:
        if (folder := find_unfinished(parent, settings, given)) is None:
            say(
                "resume=auto: found no free unfinished run with these settings and a checkpoint, "
                "starting a new one."
            )
            folder = _new(parent)
            hold(folder)
        return folder

    return _agreed(choose, parent)


def resumed_folder(settings: Settings, folder: Path) -> Path | None:
    """Return the folder of the run to resume: for resume=auto `folder`, in which that run was
    found; None if nothing is resumed."""
    if settings.resume is None or task_of(settings).is_carried(settings.resume):
        return None
    if settings.resume == "auto":
        return folder
    return find_checkpoint(settings.resume, prefer=LAST, setting="resume")[0].absolute()


def new_run_folder(parent: Path) -> Path:
    """Make a new folder below `parent`, named by the time; the same on all ranks of a
    torchrun or SLURM job."""
    if slurm_job() is not None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return _new(parent)
    return _agreed(lambda: _new(parent), parent)


def make_unique(parent: Path, name: str) -> Path:
    """Make the folder `parent`/`name`, or `name`-2, -3, ... where that exists already."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    _made.add(folder.absolute())
    return folder


def remove_unused(folder: Path) -> None:
    """Remove a folder made by this process if it has no config.yaml and no summary.json:
    its run did not begin."""
    used = any((folder / name).exists() for name in (CONFIG_FILE, SUMMARY_FILE))
    if made_here(folder) and not used:
        let_go(folder)
        shutil.rmtree(folder, ignore_errors=True)
    _made.discard(folder.absolute())


def made_here(folder: Path) -> bool:
    """Return whether this process has made the folder, for its own run."""
    return folder.absolute() in _made


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context manager: lock the folder for this process; at the end unlock it, and remove it if no
    run began in it.

    Raises UserError if another process uses it.
    """
    try:
        hold(folder)
        yield
    finally:
        let_go(folder)
        remove_unused(folder)


def _new(parent: Path) -> Path:
    """Make and return a new folder, or one named after the SLURM job, if there is one."""
    if slurm_job() is None or "TORCHELASTIC_RUN_ID" in os.environ:
        return make_unique(parent, time.strftime("%Y-%m-%d_%H-%M-%S"))
    folder = parent / f"slurm-{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_STEP_ID', '0')}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _agreed(choose: Callable[[], Path], parent: Path) -> Path:
    """Return the folder that `choose` returns on the first rank, on all ranks of a torchrun or
    SLURM job."""
    # torchrun's store passes its name to the others; SLURM's ranks look for the folder that
    # the first has locked.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        key = f"flashtrain/folders/run_folder/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if os.environ["RANK"] == "0":
            store.set(key, str(choose()))
        return Path(store.get(key).decode())
    job = slurm_job()
    return choose() if job is None or is_first_of_job() else _locked_by_job(job, parent)


def _locked_by_job(job: str, parent: Path) -> Path:
    """Return the folder below `parent` that the first rank of this SLURM job locks, once it has.
    Raises UserError if that takes too long."""
    until = time.monotonic() + _SLURM_SECONDS
    while time.monotonic() < until:
        for folder in newest_first(parent):
            if is_locked_by_job(folder, job):
                return folder
        time.sleep(0.5)
    raise UserError(
        f"the job's first rank locked no folder in {parent} in {_SLURM_SECONDS:.0f} seconds. "
        "See the log of that rank."
    )


@contextlib.contextmanager
def new_folder(parent: Path, name: str) -> Iterator[tuple[Path, Path]]:
    """Context manager: make the folder `parent`/`name` (or `name`-2, -3, ... if that exists) as a
    whole, at the end of the `with` block.

    It yields (a temporary folder to write to, the folder that this becomes). An exception removes
    the temporary folder; one that a kill has left is removed by the next call.
    """
    unfinished = parent / f".{name}.unfinished"
    with filelock.FileLock(parent / f".{name}.lock"):
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
        folder = next(parent / one for one in names if not (parent / one).exists())
        try:
            yield unfinished, folder
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
