"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashtrain.errors import causes

UNFINISHED = ".unfinished"  # ends the name of a file that is still being written


def os_errors(error: BaseException) -> Iterator[OSError]:
    """The operating system's errors among this one and those that led to it, the latest first: torch.save, say, wraps
    some of them in a RuntimeError."""
    return (one for one in causes(error) if isinstance(one, OSError))


@contextmanager
def replacing(path: str | Path, *, sync: bool = False) -> Iterator[Path]:
    """A name beside `path` to write a file to, which takes its place at the context's end.

    A reader sees the old file or the new, never half of one.
    What stood there is replaced, whatever it is: a link is not written through, a pipe is not waited for. Where writing
    fails, nothing is left beside it, and the file is as it was.
    sync: have the content on the disk before the name, for what must outlive a power cut too.
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
    """Have a file's content, or a folder's names, on the disk."""
    if path.is_dir() and os.name != "posix":  # elsewhere a folder cannot be opened, nor needs to be
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: str | Path, text: str) -> Path:
    """Write a text file by `replacing`."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
    return Path(path)
