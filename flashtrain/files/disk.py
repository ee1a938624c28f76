"""Atomic writes: a file is replaced as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashtrain.errors import causes

UNFINISHED = ".unfinished"  # ends the name of a file that is still being written


def os_errors(error: BaseException) -> Iterator[OSError]:
    """Yield the OSErrors among an error and its causes, the latest first (torch.save wraps
    some in a RuntimeError)."""
    return (one for one in causes(error) if isinstance(one, OSError))


@contextmanager
def replacing(path: str | Path, *, sync: bool = False) -> Iterator[Path]:
    """Context manager: yield a temporary path next to `path`, and rename the file written
    there to `path` at the end.

    A reader sees the old file or the new one, never a part. If writing fails, the temporary file is
    removed, and `path` is unchanged. A link or pipe at `path` is replaced, and not written to.

    Args:
        path: the file to write.
        sync: flush content and name to the disk, for files that must survive a power cut.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        yield unfinished
        if sync:
            flush(unfinished)
        unfinished.replace(path)
        if sync:
            flush(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Flush a file's content, or a folder's names, to the disk."""
    # On Windows a folder can neither be opened nor needs to be.
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: str | Path, text: str, *, sync: bool = False) -> Path:
    """Write a text file atomically, in UTF-8, and return its path. For `sync` see `replacing`."""
    with replacing(path, sync=sync) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
    return Path(path)
