"""`flashtrain cache`: what the cache of token files holds, by what their builder noted of them, and its removal."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import filelock

from flashtrain.data.token_builder import amount
from flashtrain.data.token_cache import META, CacheMeta, DamagedCacheError
from flashtrain.data.tokenizers import load_tokenizer
from flashtrain.errors import UserError, printable
from flashtrain.files.caches import default_cache_dir

USAGE = "flashtrain cache, flashtrain cache clear KEY, flashtrain cache clear all; each also with data.cache_dir=FOLDER"


def run_cache(words: Sequence[str]) -> int:
    """The command's words after `cache`. Returns the exit status. Raises UserError."""
    named = [word for word in words if word.startswith("data.cache_dir=")]
    rest = [word for word in words if word not in named]
    base = Path(named[-1].partition("=")[2]).expanduser() if named else default_cache_dir()
    if rest in ([], ["list"]):
        print(listing(base))
    elif len(rest) == 2 and rest[0] == "clear":
        for line in clear(base, rest[1]):
            print(line)
    else:
        raise UserError(f"'cache {' '.join(rest)}' is no command. Possible: {USAGE}.")
    return 0


LEFTOVER = re.compile(r"(?P<key>.+)\.building-\d+-[0-9a-f]{8}(?:-replaced)?")  # of a build that was killed


class Entry(NamedTuple):
    """One token file. key: the folder's name. bytes: of what its builder noted. used: when it was last opened."""

    folder: Path
    meta: CacheMeta
    bytes: int
    used: datetime

    @property
    def key(self) -> str:
        return self.folder.name

    @property
    def tokenizer(self) -> str:
        """In words; "damaged" where it cannot be read."""
        try:
            return load_tokenizer(self.folder / "tokenizer").describe()
        except UserError:
            return "damaged"


def entries(base: Path) -> list[Entry]:
    """The token files in a cache folder, the latest used first; what else lies there is left alone."""
    found = []
    for folder in base.iterdir() if base.is_dir() else ():
        if LEFTOVER.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
            continue
        with contextlib.suppress(DamagedCacheError, OSError):
            meta = CacheMeta.read(folder)
            size = sum(int(noted["bytes"]) for noted in meta.files.values())
            found.append(Entry(folder, meta, size, datetime.fromtimestamp((folder / META).stat().st_mtime)))
    return sorted(found, key=lambda entry: entry.used, reverse=True)


def listing(base: Path) -> str:
    """The token files as lines to print: a table, and how to remove them."""
    found = entries(base)
    if not found:
        return f"no token file in {base}"
    head = ("key", "text", "tokenizer", "tokens", "size", "last used")
    rows = [
        (
            entry.key,
            printable(entry.meta.source),
            entry.tokenizer,
            f"{entry.meta.tokens:,}",
            amount(entry.bytes),
            f"{entry.used:%Y-%m-%d %H:%M}",
        )
        for entry in found
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    many = "" if len(found) == 1 else "s"
    total = f"{len(found)} token file{many}, {amount(sum(entry.bytes for entry in found))}, in {base}"
    return "\n".join(
        [*map(str.rstrip, lines), total, "remove one: flashtrain cache clear KEY; or: flashtrain cache clear all"]
    )


def clear(base: Path, key: str) -> Iterator[str]:
    """Remove the token file of this key, or "all" with what killed builds left; says of each what became of it.

    What is being written stays, and so does every file that flashtrain did not write. Raises UserError: no such key.
    """
    found = entries(base)
    if key == "all":
        yield from _clear_leftovers(base)
    else:
        found = [entry for entry in found if entry.key == key]
        if not found:
            known = ", ".join(entry.key for entry in entries(base)) or "none"
            raise UserError(f"no token file '{key}' in {base}. Possible: all, {known}.")
    for entry in found:
        lock = filelock.FileLock(f"{entry.folder}.lock")
        try:
            with lock.acquire(timeout=0):
                left = _remove(entry)
                if not left:
                    _unlink(Path(lock.lock_file))
        except filelock.Timeout:
            yield f"{entry.key} is being written: it stays"
        except OSError as error:
            yield f"{entry.key} cannot be removed: {error.strerror or error}"
        else:
            stays = f"; the folder stays, with what is not flashtrain's: {printable(left)}" if left else ""
            yield f"removed {entry.key}, {amount(entry.bytes)}{stays}"


def _remove(entry: Entry) -> str:
    """Remove the noted files and the folders that are empty then; the name of something that is left, or ""."""
    inside = entry.folder.resolve()
    # Its notes last: a removal that is broken off is found again.
    for path in [*(entry.folder / name for name in entry.meta.files), entry.folder / META]:
        if path.parent.resolve().is_relative_to(inside):  # not through a link to elsewhere
            path.unlink(missing_ok=True)
    for folder in sorted(
        (path for path in entry.folder.rglob("*") if path.is_dir() and not path.is_symlink()), reverse=True
    ):
        with contextlib.suppress(OSError):
            folder.rmdir()
    left = next(entry.folder.iterdir(), None)
    if left is None:
        entry.folder.rmdir()
    return "" if left is None else left.name


def _clear_leftovers(base: Path) -> Iterator[str]:
    for folder in list(base.iterdir()) if base.is_dir() else ():
        named = LEFTOVER.fullmatch(folder.name)
        if named is None or folder.is_symlink() or not folder.is_dir():
            continue
        with contextlib.suppress(filelock.Timeout), filelock.FileLock(base / f"{named['key']}.lock").acquire(timeout=0):
            shutil.rmtree(folder, ignore_errors=True)
            yield f"removed what a killed build of {named['key']} left"


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):  # Windows keeps what is open
        path.unlink(missing_ok=True)
