"""Interfaces of text and token sources, and the source that every machine has: the Python
standard library's code."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from flashtrain.errors import UserError

log = logging.getLogger(__name__)

NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
TEST_FOLDERS = {"test", "tests", "idle_test"}


@runtime_checkable
class TextSource(Protocol):
    """A source of text: any class with these four methods."""

    def describe(self) -> str:
        """Return a short description, on one line."""

    def fingerprint(self) -> str:
        """Return a text that changes whenever the documents change. Must be cheap: every
        start of a run calls this."""

    def documents(self) -> Iterator[str]:
        """Yield the documents, always in the same order. Empty documents are
        left out of the corpus."""

    def approximate_bytes(self) -> int | None:
        """Estimate the bytes of UTF-8 text, for progress lines and plans; None if unknown."""


@runtime_checkable
class TokenSource(Protocol):
    """A source of ready-made tokens: any class with these two methods. Nothing is tokenized
    or copied to the cache."""

    def describe(self) -> str:
        """Return a short description, on one line."""

    def open_tokens(self, tokenizer: Any, cache_dir: str | os.PathLike[str] | None) -> Any:
        """Open the tokens.

        Args:
            tokenizer: As in TextDataModule.
            cache_dir: Folder of caches (None: default_cache_dir()).

        Returns:
            A token_cache.OpenTokens, or an object with the same attributes.
        """


@dataclass
class StandardLibrarySource:
    """A TextSource: the source code of this machine's Python standard library, one
    document per .py file.

    It is real text with nothing to download: about 30 MB with its tests, 13 MB without. Installed
    packages are left out, and so are files that are not UTF-8 (a few of the tests are broken on
    purpose). Raises UserError if the library's source files are not installed.
    """

    include_tests: bool = True  # whether the library's own tests are part of the text

    def __post_init__(self) -> None:
        self.folder = Path(sysconfig.get_paths()["stdlib"])

    def describe(self) -> str:
        tests = "" if self.include_tests else " without its tests"
        return f"Python {platform.python_version()} standard library{tests}"

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"stdlib {platform.python_version()}".encode())
        for path in self.files():
            digest.update(
                f"\n{path.relative_to(self.folder).as_posix()} {path.stat().st_size}".encode()
            )
        return digest.hexdigest()

    def documents(self) -> Iterator[str]:
        for path in self.files():
            try:
                yield path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                log.debug("%s is not UTF-8: left out", path)

    def approximate_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files())

    def files(self) -> list[Path]:
        """List the source files in the order of their paths."""
        skipped = (
            NOT_STANDARD_LIBRARY if self.include_tests else NOT_STANDARD_LIBRARY | TEST_FOLDERS
        )
        found = []
        for folder, subfolders, names in os.walk(self.folder):
            subfolders[:] = [name for name in subfolders if name not in skipped]
            found += [Path(folder, name) for name in names if name.endswith(".py")]
        if not found:
            raise UserError(
                f"no source files of the Python standard library in {self.folder} (some "
                "distributions omit them). Use your own text files (data=files data.path=...)."
            )
        return sorted(found)


def text_in(row: Mapping[str, Any], column: str, where: str) -> str | None:
    """Return the text in a column of a row, or None if it is null.

    Args:
        row, column: The row as a dictionary, and the name of the column.
        where: Where the row stands, such as file and line, for messages of errors.

    Raises:
        UserError: There is no such column, or it holds no text.
    """
    if column not in row:
        raise UserError(
            f"{where}: no column '{column}', expected one of {', '.join(row)}. "
            "Set data.text_column to it."
        )
    text = row[column]
    if text is not None and not isinstance(text, str):
        raise UserError(
            f"{where}: column '{column}' holds a {type(text).__name__}, not text. "
            "Set data.text_column to a column of texts."
        )
    return text


def held_out(source: Any) -> Any:
    """Return a source that reads the files of `source` named for validation; None
    if it has no such files."""
    own = getattr(source, "held_out", None)
    return own() if callable(own) else None
