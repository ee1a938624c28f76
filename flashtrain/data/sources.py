"""What a source of text or of tokens is, and the one that every machine has: the Python standard library's source."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from flashtrain.errors import UserError

log = logging.getLogger(__name__)

NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
TEST_FOLDERS = {"test", "tests", "idle_test"}


@runtime_checkable
class TextSource(Protocol):
    """What the token cache needs from a source of text; a class of one's own with these four methods will do."""

    def describe(self) -> str:
        """A few words for people, on one line."""
        ...

    def fingerprint(self) -> str:
        """Changes whenever the documents change. Must be cheap: every start of a run asks for it."""
        ...

    def documents(self) -> Iterator[str]:
        """The documents, always in the same order. Empty ones are left out of the corpus."""
        ...

    def approximate_bytes(self) -> int | None:
        """About how many bytes of UTF-8 text there are, for progress bars and plans; None where nobody knows."""
        ...


@runtime_checkable
class TokenSource(Protocol):
    """A source that brings its tokens: nothing is tokenised, and nothing is copied into the cache."""

    def describe(self) -> str:
        """A few words for people, on one line."""
        ...

    def open_tokens(self, tokenizer: Any, cache_dir: str | os.PathLike[str] | None) -> Any:
        """A token_cache.OpenTokens, or what serves as one. tokenizer: as TextDataModule takes it. Raises UserError."""
        ...


class StandardLibrarySource:
    """The Python standard library's own source code, as found on this machine: a document a .py file.

    Real text on every machine with nothing to download: about 30 MB with its tests, 13 MB without. Installed packages
    are no part of it. Files that are not UTF-8 are left out (a few of the tests are broken on purpose).
    """

    def __init__(self, include_tests: bool = True) -> None:
        self.include_tests = include_tests
        self.folder = Path(sysconfig.get_paths()["stdlib"])

    def describe(self) -> str:
        tests = "" if self.include_tests else " without its tests"
        return f"Python {platform.python_version()} standard library{tests}"

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"stdlib {platform.python_version()}".encode())
        for path in self._files():
            digest.update(f"\n{path.relative_to(self.folder).as_posix()} {path.stat().st_size}".encode())
        return digest.hexdigest()

    def documents(self) -> Iterator[str]:
        for path in self._files():
            try:
                yield path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                log.debug("%s is not UTF-8: left out", path)

    def approximate_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._files())

    def _files(self) -> list[Path]:
        skipped = NOT_STANDARD_LIBRARY if self.include_tests else NOT_STANDARD_LIBRARY | TEST_FOLDERS
        found = []
        for folder, subfolders, names in os.walk(self.folder):
            subfolders[:] = [name for name in subfolders if name not in skipped]
            found += [Path(folder, name) for name in names if name.endswith(".py")]
        if not found:
            raise UserError(
                f"no source files of the Python standard library in {self.folder} (some distributions omit them). "
                "Use your own text files (data=files data.path=...)."
            )
        return sorted(found)


def held_out(source: Any) -> Any:
    """What a source holds out by its files' names, as a source of its own; None where nothing is."""
    own = getattr(source, "held_out", None)
    return own() if callable(own) else None
