"""Lock a run folder, so that only one process at a time writes into it."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import warnings
from pathlib import Path

import filelock

from flashtrain.announce import say
from flashtrain.errors import UserError
from flashtrain.files.disk import UNFINISHED, write_atomically

# The operating system locks the former, and releases it when the process ends in any way. The
# latter names the process.
LOCK, HOLDER = ".lock", ".lock.json"
# Errors of file systems without locks (some NFS and FUSE mounts); filelock 3.30 knows
# only the first of them.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP}

# The folders that this process has locked, with their locks (None on a file system without locks).
_locks: dict[Path, filelock.BaseFileLock | None] = {}


class Busy(UserError):
    """Another run is using the folder."""


def hold(folder: Path, *, wait: float = 0) -> None:
    """Lock a run folder for this process until `let_go` or the process's end; make the
    folder if it is missing.

    Nothing happens if this process has the lock already, or is not the first rank, which locks for
    all ranks. On a file system without locks a line is printed, and the run continues.

    Args:
        folder: the run's folder.
        wait: seconds to wait for another process.

    Raises:
        Busy: another process still has the lock.
        UserError: the folder has links that lead out of it.
    """
    key = folder.resolve()
    if key in _locks or not is_first_of_job():
        return
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_links(folder)
    try:
        lock = _locked(folder, wait)
    except filelock.Timeout as error:
        record = _holder_record(folder)
        who = "process unknown"
        if record:
            who = "process {process} on {host} since {since}".format(**record)
        line = f"another run is using {folder}: {who}. Wait until it ends, or use another folder."
        raise Busy(line) from error
    if lock is None:
        say(
            f"{folder} is on a file system without locks: a second run in it would not be detected."
        )
    else:
        # A killed run may have left unfinished files. No other process writes here now.
        for path in folder.rglob(f".*{UNFINISHED}"):
            path.unlink(missing_ok=True)
    _locks[key] = lock
    record = {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    write_atomically(folder / HOLDER, json.dumps({**record, "job": slurm_job()}) + "\n")


def try_hold(folder: Path) -> bool:
    """Lock the folder as `hold` does, and return whether that succeeded; if
    not, print the reason."""
    try:
        hold(folder)
    except UserError as error:
        say(f"skipping {folder}: {error}")
        return False
    return True


def let_go(folder: Path) -> None:
    """Release the lock of the folder if this process has it. The lock file stays: waiting
    processes have it open."""
    key = folder.resolve()
    if key not in _locks:
        return
    (folder / HOLDER).unlink(missing_ok=True)
    lock = _locks.pop(key)
    if lock is not None:
        lock.release()


def is_locked_by_job(folder: Path, job: str) -> bool:
    """Return whether the first rank of the SLURM job `job` (see `slurm_job`)
    has locked the folder."""
    return _holder_record(folder).get("job") == job


def is_first_of_job() -> bool:
    """Return whether this process is the only rank or the first one, also before
    the ranks are connected.

    The answer comes from variables that torchrun, SLURM and Lightning (for the
    ranks that it starts) set.
    """
    names = ["RANK", "LOCAL_RANK", "NODE_RANK"]
    if slurm_job() is not None:
        names.append("SLURM_PROCID")
    return all(os.environ.get(name, "0") in ("", "0") for name in names)


def slurm_job() -> str | None:
    """Return a name that all ranks of a SLURM step share; None outside SLURM, and
    in a step of one rank."""
    if "SLURM_JOB_ID" not in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) < 2:
        return None
    step, restart = (os.environ.get(f"SLURM_{name}", "0") for name in ("STEP_ID", "RESTART_COUNT"))
    return f"slurm-{os.environ['SLURM_JOB_ID']}-{step}-{restart}"


def _refuse_links(folder: Path) -> None:
    """Raise UserError if a link in the folder leads out of it: the folder may come from anybody,
    and a write to the link would end elsewhere."""
    # W&B's own folder is left out: it has links to its logs, and each run has a new one in it.
    inside = folder.resolve()
    for current, folders, files in os.walk(inside):
        for name in (*folders, *files):
            path = Path(current, name)
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
                raise UserError(
                    f"{path} is a link that leads out of its run folder. Remove the link."
                )
        folders[:] = [name for name in folders if name != "wandb"]


def _locked(folder: Path, wait: float) -> filelock.BaseFileLock | None:
    """Return the acquired lock; None if the file system has no locks. Raises filelock.Timeout if
    another process has it after `wait` seconds, OSError if it cannot be written."""
    lock = filelock.FileLock(str(folder / LOCK))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the fallback below
            lock.acquire(timeout=wait, poll_interval=0.2)
    except (NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise
        return None
    if isinstance(lock, filelock.SoftFileLock):  # this kind stays when its process is killed
        lock.release()
        return None
    return lock


def _holder_record(folder: Path) -> dict[str, object]:
    try:
        return json.loads((folder / HOLDER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
