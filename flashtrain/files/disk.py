"""The disk: what it answers, what a spreadsheet reads, where flashtrain's own files and caches lie.

Writing a file whole or not at all, and what is said where a disk is full or a place cannot be written.

What a spreadsheet takes for a formula, and how a CSV file says that it is text.

Where conf/ and recipes/ lie on this machine.

An installed wheel carries both inside the package (flashtrain/conf, flashtrain/recipes); a checkout, whether it is on
PYTHONPATH or installed as editable, has them beside the package. Every reader of a configuration or a recipe asks here.

Where flashtrain keeps what it can rebuild, token files above all, and how one process at a time writes it.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError, printable

UNFINISHED = ".unfinished"  # ends the name of a file that is still being written

# No space, no quota left (which Windows does not know), or larger than the file system allows.
FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
# A disk that fails, or a path that is no usable one: links in a circle, a name of 300 letters, a file for a folder.
UNUSABLE = {
    errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR,
}  # fmt: skip


def disk_line(error: BaseException) -> str | None:
    """The line for an error that stems from a full or unwritable disk, or a path that cannot be; None for any other.

    Libraries raise errors of their own from an OSError: what led to this one is looked through.
    """
    for seen in os_errors(error):
        if seen.errno in FULL | UNUSABLE:
            where = f" {seen.filename}" if seen.filename else ""
            if seen.errno in FULL:
                return f"the disk is full: cannot write{where} ({seen.strerror})."
            return f"cannot read or write{where}: {seen.strerror}."
    return None


def os_errors(error: BaseException) -> Iterator[OSError]:
    """The operating system's errors among this one and those that led to it, the latest first: torch.save, say, wraps
    some of them in a RuntimeError."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            yield seen
        seen = seen.__cause__ or seen.__context__


def write_atomically(path: str | Path, text: str) -> Path:
    """Write a text file so that a reader sees the old text or the new, never half of one.

    What stood there is replaced, whatever it is: a link is not written through, a pipe is not waited for. Raises
    UserError.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # half a character, which JSON can say and UTF-8 cannot, is written as JSON says it
        unfinished.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}.") from error
    return path


_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def csv_value(value: Any) -> Any:
    """A value as a CSV file holds it: text that a spreadsheet would compute (=SUM(A1:A9)) begins with an apostrophe,
    and its control characters are told as \\x1b. Numbers, also those that are text already (-0.5), stay as they are.
    """
    if not isinstance(value, str) or _is_number(value):
        return value
    formula = value.startswith(_FORMULAS) or value.lstrip().startswith(_FORMULAS)
    return printable(f"'{value}" if formula else value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


RECIPES_VARIABLE = "FLASHTRAIN_RECIPES"

_PACKAGE = Path(__file__).resolve().parents[1]


def conf_folder() -> Path:
    """The folder of Hydra's config groups. Raises UserError when the installation lacks it."""
    return _shipped_folder("conf")


def recipes_folder() -> Path:
    """The folder of flashtrain's own recipes. Raises UserError when the installation lacks it."""
    return _shipped_folder("recipes")


def recipe_files(extra_folders: Iterable[str | Path] = ()) -> dict[str, Path]:
    """Every recipe by name, sorted: NAME.yaml in flashtrain's folder, in FLASHTRAIN_RECIPES' and in `extra_folders`.

    FLASHTRAIN_RECIPES lists folders separated as PATH's are (os.pathsep). A folder named twice counts once.
    Raises UserError for a folder that does not exist, and for two files of one name: which of them runs must not
    depend on the order of folders.
    """
    from_environment = [part for part in os.environ.get(RECIPES_VARIABLE, "").split(os.pathsep) if part.strip()]
    folders = [recipes_folder()]
    folders += [_user_folder(part, f"{RECIPES_VARIABLE} names") for part in from_environment]
    folders += [_user_folder(part, "asked for") for part in extra_folders]

    found: dict[str, Path] = {}
    for folder in dict.fromkeys(folders):
        for file in sorted(folder.glob("*.yaml")):
            if file.stem in found:
                raise UserError(
                    f"two recipes are called '{file.stem}': {found[file.stem]} and {file}. Rename one of the files."
                )
            found[file.stem] = file
    return dict(sorted(found.items()))


def recipe_description(path: str | Path) -> str:
    """What a recipe says of itself: the first comment line of its YAML file, without '#'; "" where it has none.

    Hydra's own first line (`# @package _global_`) is not a description and is passed over.
    """
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("#"):
            text = text.lstrip("#").strip()
            if text and not text.startswith("@package"):
                return text
    return ""


def _shipped_folder(name: str) -> Path:
    # The wheel's place comes first: beside an installed package lies site-packages, where a folder `conf` could be
    # anyone's. In a checkout the package itself never holds these folders.
    candidates = [_PACKAGE / name, _PACKAGE.parent / name]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise UserError(
        f"flashtrain's folder '{name}' is neither at {candidates[0]} nor at {candidates[1]}: "
        "install flashtrain again, or put the root of a whole checkout on PYTHONPATH."
    )


def _user_folder(given: str | Path, said_by: str) -> Path:
    folder = Path(given).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"{said_by} the recipe folder '{given}', which is not a folder.")
    return folder


log = logging.getLogger(__name__)


@contextmanager
def only_writer(path: Path, setting: str) -> Iterator[None]:
    """Within the context no other process writes `path`, a file or folder of a cache; one that does is waited for.

    setting: the name of the setting that chooses the cache's folder, for the UserError where that cannot be written.
    """
    import filelock  # when it is needed: the command's help locks nothing

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(f"{path}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            log.info("another process is writing %s; waiting for it", path.name)
            lock.acquire()
    except OSError as error:
        raise UserError(
            f"cannot write to the cache folder {path.parent}: {error.strerror}. Choose another with {setting}, or "
            "set FLASHTRAIN_CACHE."
        ) from error
    try:
        yield
    finally:
        lock.release()


def default_cache_dir() -> Path:
    """The folder for caches: $FLASHTRAIN_CACHE where set, else the platform's own place for a user's caches.

    Linux: $XDG_CACHE_HOME or ~/.cache; macOS: ~/Library/Caches; Windows: %LOCALAPPDATA%; each with /flashtrain.
    """
    from platformdirs import PlatformDirs  # when it is asked for: the command's help needs no cache

    chosen = os.environ.get("FLASHTRAIN_CACHE")
    # opinion: on Windows no folder Cache inside of it, where caches of earlier versions do not lie.
    dirs = PlatformDirs("flashtrain", appauthor=False, opinion=False)
    return Path(chosen).expanduser() if chosen else dirs.user_cache_path
