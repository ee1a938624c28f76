"""Where text comes from: a source hands out documents, one string each, and everything after it sees only those."""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from flashtrain.data.json_lines import json_lines
from flashtrain.data.parquet_rows import parquet_rows
from flashtrain.data.text_encodings import UTF_8, Decoder, check_encoding
from flashtrain.errors import UserError, first_line
from flashtrain.files.compressed_files import COMPRESSIONS, open_binary

if TYPE_CHECKING:
    import pyarrow

__all__ = ["FilesSource", "StandardLibrarySource", "TextSource", "make_source"]

log = logging.getLogger(__name__)

Row = TypeVar("Row")

WHOLE_FILE_FORMATS = (".txt", ".md")
FORMATS = (*WHOLE_FILE_FORMATS, ".jsonl", ".parquet")
READABLE = f"{', '.join(FORMATS)} (all but .parquet also with {', '.join(COMPRESSIONS)})"

TYPICAL_RATIO = {".gz": 3.0, ".xz": 3.5, ".zst": 3.0, ".parquet": 2.0}
"""Bytes of text in a byte of file, roughly, for English and code."""

LISTED = 3  # files by name, in a line that counts more
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*(?:::|://)")  # s3://..., and zip://...::s3://...


class FilesSource:
    """A file, or every readable file below a folder in the order of their paths; hidden files are left out, and so are
    those named for another split than this source is of (split_names).

    path: file or folder, or an address that fsspec reads ("s3://bucket/folder"). text_column: the field of .jsonl
    objects and .parquet rows that holds the text; rows where it is null are left out. encoding: of .txt, .md and .jsonl
    (text_encodings.check_encoding). encoding_errors: "strict", or "replace": bytes that are no text become U+FFFD, and
    a logged line counts them.
    Raises UserError for a missing path, no readable file, a malformed file or line, a missing column, bytes that are no
    text, and an unknown encoding.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        text_column: str = "text",
        *,
        encoding: str = UTF_8,
        encoding_errors: str = "strict",
    ) -> None:
        self.address = path if isinstance(path, str) and ADDRESS.match(path) else None
        self.path = Path(path).expanduser()
        self.text_column = text_column
        self.encoding = check_encoding(encoding)
        self.encoding_errors = encoding_errors
        self.split = "train"
        self._replaced: dict[str, int] = {}  # by file: bytes
        self._logged: set[str] = set()  # files of which that was logged: they are read more than once

    def describe(self) -> str:
        if self.address is not None:
            return f"files at {self.address}"
        return f"files in {self.path}" if self.path.is_dir() else f"file {self.path}"

    def held_out(self) -> FilesSource | None:
        """The files that are named for validation, as a source of their own; None where none is."""
        found = self._by_split()
        for split, what in (("validation", "held out"), ("test", "left out")):
            if split in found:
                log.info("%s: %s", what, ", ".join(path.name for path in found[split]))
        if "validation" not in found:
            return None
        other = copy(self)
        other.split = "validation"
        return other

    def paths(self) -> list[Path]:
        """The files that are read. Not of an address."""
        return self._files()

    def fingerprint(self) -> str:
        encoding = "" if self.encoding == UTF_8 else f"\nencoding {self.encoding}"
        if self.encoding_errors != "strict":
            encoding += f" {self.encoding_errors}"
        files = self._files()
        if self.address is not None:
            contents = repr([(file.relative, file.size, file.version) for file in files])
        else:
            from flashtrain.files.content_hashes import hash_of_contents  # when text is read: not for help or a plan

            contents = hash_of_contents(self.path if self.path.is_dir() else self.path.parent, files)
        return hashlib.sha256(f"files {self.text_column}{encoding}\n{contents}".encode()).hexdigest()

    def documents(self) -> Iterator[str]:
        for path in self._files():
            yield from self._of_file(path)
        self._log_replaced()

    def shards(self) -> list[Callable[[], Iterator[str]]]:
        """The documents of each file, to be read apart."""
        return [partial(self._shard, path) for path in self._files()]

    def _shard(self, path: Any) -> Iterator[str]:
        yield from self._of_file(path)
        self._log_replaced()

    def _of_file(self, path: Any) -> Iterator[str]:
        return self._named(path, self._read(path))

    def _named(self, path: Any, rows: Iterator[Row]) -> Iterator[Row]:
        """The rows; errors of libraries, which may not say which file they were reading, name it."""
        try:
            yield from rows
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"cannot read {path}: {first_line(error)}.") from error

    def _decoder(self, path: Any) -> Decoder:
        return Decoder(path, self.encoding, self.encoding_errors)

    def _note(self, decoder: Decoder) -> None:
        if decoder.replaced:
            self._replaced[str(decoder.path)] = decoder.replaced

    def _log_replaced(self) -> None:
        new = {path: count for path, count in self._replaced.items() if path not in self._logged}
        if new:
            self._logged |= new.keys()
            listed = ", ".join(f"{count:,} of {path}" for path, count in list(new.items())[:LISTED])
            more = f" and {len(new) - LISTED:,} more files" if len(new) > LISTED else ""
            log.warning("%s bytes became U+FFFD: %s%s", f"{sum(new.values()):,}", listed, more)

    def approximate_bytes(self) -> int:
        ratio = (TYPICAL_RATIO.get(path.suffix.lower(), 1.0) * path.stat().st_size for path in self._files())
        return round(sum(ratio))

    def _files(self) -> list[Any]:
        """Paths, or what stands for them of an address."""
        return self._by_split()[self.split]

    def _by_split(self) -> dict[str, list[Any]]:
        from flashtrain.data.split_names import by_split  # a plan needs none of it

        where = self.address or self.path
        if self.address is not None:
            from flashtrain.files.addresses import remote_files

            found: list[Any] = [file for file in remote_files(self.address) if _format(file) is not None]
            names: list[PurePath] = [PurePosixPath(file.relative) for file in found]
        elif self.path.is_file():
            found = [self.path] if _format(self.path) is not None else []
            names = [PurePath(self.path.name)]
        elif self.path.is_dir():
            found = sorted(path for path in files_below(self.path) if _format(path) is not None)
            names = [path.relative_to(self.path) for path in found]
        else:
            raise no_such_path(self.path)
        if not found:
            raise UserError(f"no readable file at data.path={where}; what is read: {READABLE}.")
        return {"train": found} if found == [self.path] else by_split(found, names)

    def _read(self, path: Path) -> Iterator[str]:
        kind = _format(path)
        if kind == ".parquet":
            return self._read_parquet(path)
        if kind == ".jsonl":
            return self._read_jsonl(path)
        return self._read_whole(path)

    def _read_whole(self, path: Path) -> Iterator[str]:
        decoder = self._decoder(path)
        with open_binary(path) as file:
            text = "".join(decoder.pieces(file))
        self._note(decoder)
        yield text

    def _read_jsonl(self, path: Path) -> Iterator[str]:
        decoder = self._decoder(path)
        for where, row in json_lines(path, decoder):
            if not isinstance(row, dict):
                raise UserError(f"{where}: holds a JSON {_json_type(row)}, not an object with fields.")
            if self.text_column not in row:
                raise _no_column(where, self.text_column, row)
            text = row[self.text_column]
            if isinstance(text, str):
                yield text
            elif text is not None:
                raise UserError(f"{where}: '{self.text_column}' holds a JSON {_json_type(text)}, not text.")
        self._note(decoder)

    def _read_parquet(self, path: Path) -> Iterator[str]:
        def columns(schema: pyarrow.Schema) -> list[str]:
            if self.text_column not in schema.names:
                raise _no_column(str(path), self.text_column, schema.names)
            kind = schema.field(self.text_column).type
            if str(kind) not in ("string", "large_string"):
                raise UserError(f"{path}: column '{self.text_column}' holds {kind}, not text.")
            return [self.text_column]

        for row in parquet_rows(path, columns):
            if row[self.text_column] is not None:
                yield row[self.text_column]


def _format(path: Any) -> str | None:
    """Which of FORMATS the file has by its name, compression aside; None when it is not read."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if not suffixes:
        return None
    if suffixes[-1] in COMPRESSIONS:
        inner = suffixes[-2] if len(suffixes) > 1 else None
        return inner if inner in FORMATS and inner != ".parquet" else None
    return suffixes[-1] if suffixes[-1] in FORMATS else None


def files_below(folder: Path) -> Iterator[Path]:
    """Every file below the folder that is not hidden. Linked folders are followed, each real folder once."""
    seen: set[str] = set()
    for current, subfolders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(current)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            path = Path(current, name)
            if not name.startswith(".") and path.is_file():
                yield path


def no_such_path(path: Path) -> UserError:
    """The error for a file or folder that is not there, with the nearest names beside it."""
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=3)
    hint = f" Did you mean {' or '.join(str(path.with_name(name)) for name in near)}?" if near else ""
    return UserError(f"no file or folder {path} (seen from {Path.cwd()}).{hint}")


def _no_column(where: str, given: str, possible: Iterable[str]) -> UserError:
    columns = ", ".join(map(str, possible)) or "none"
    return UserError(f"{where}: no column '{given}'. Possible: {columns} (set it with data.text_column).")


def _json_type(value: object) -> str:
    names = {bool: "true or false", int: "number", float: "number", str: "string", list: "list", dict: "object"}
    return names.get(type(value), "null")


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
        """What serves as an open token_cache.TokenCache. tokenizer: as TextDataModule takes it. Raises UserError."""
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
                f"no source files of the Python standard library in {self.folder} (some distributions leave them out); "
                "use text files of your own (data=files data.path=...)."
            )
        return sorted(found)


def held_out(source: Any) -> Any:
    """What a source holds out by its files' names, as a source of its own; None where nothing is."""
    own = getattr(source, "held_out", None)
    return own() if callable(own) else None


def make_source(
    source: str | os.PathLike[str] | TextSource | TokenSource, path: str | os.PathLike[str] | None = None
) -> TextSource | TokenSource:
    """A source from its short form: "stdlib", "files" with a path, or the path of a file or folder of text itself. A
    TextSource stays itself. UserError: a path with another source, or "files" without one."""
    if path is not None and source != "files":
        raise UserError(f"path={path} is for source='files', and this is source={source!r}: leave one of them out.")
    if source == "files" and (path is not None or not Path("files").exists()):
        if path is None:
            raise UserError("source='files' needs path=..., a file or folder of text.")
        return FilesSource(path)
    if isinstance(source, (str, os.PathLike)):
        if os.fspath(source) == "stdlib":
            return StandardLibrarySource()
        return FilesSource(source)
    if isinstance(source, (TextSource, TokenSource)):
        return source
    raise UserError(
        f"source={source!r} is no source of text: give 'files' with path=..., 'stdlib', a path, or an object with "
        "describe(), fingerprint(), documents() and approximate_bytes()."
    )
