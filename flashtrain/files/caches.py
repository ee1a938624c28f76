"""The cache folder, for files that can be rebuilt (such as token files), and the
lock for writing to it."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashtrain.errors import UserError

log = logging.getLogger(__name__)

CANNOT_WRITE = (
    errno.EACCES,
    errno.EDQUOT,
    errno.EFBIG,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)


@contextmanager
def only_writer(path: Path, setting: str) -> Iterator[None]:
    """Context manager: lock `path`, so that no other process writes it; if another
    process has the lock, wait.

    Args:
        path: a file or folder in the cache.
        setting: name of the setting that chooses the cache's folder, for messages of errors.

    Raises:
        UserError: the cache's folder cannot be written.
    """
    import filelock  # here, since the command's help locks nothing

    lock = filelock.FileLock(f"{path}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            log.info("waiting for another process that is writing %s", path.name)
            lock.acquire()
        yield
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        raise UserError(
            f"cannot write to the cache folder {path.parent}: {error.strerror}. "
            f"Set {setting} or FLASHTRAIN_CACHE to another folder."
        ) from error
    finally:
        lock.release()


def default_cache_dir() -> Path:
    """Return the folder of caches: $FLASHTRAIN_CACHE if set, else the platform's
    folder for a user's caches.

    Linux: $XDG_CACHE_HOME or ~/.cache; macOS: ~/Library/Caches; Windows: %LOCALAPPDATA%;
    each with /flashtrain.
    """
    from platformdirs import PlatformDirs  # here, since the command's help needs no cache

    chosen = os.environ.get("FLASHTRAIN_CACHE")
    # opinion=False: without a subfolder Cache on Windows, which earlier versions did not have.
    dirs = PlatformDirs("flashtrain", appauthor=False, opinion=False)
    return Path(chosen).expanduser() if chosen else dirs.user_cache_path
