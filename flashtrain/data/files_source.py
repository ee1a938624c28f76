"""Text files of one's own: a document a .txt or .md file, a line of .jsonl, a row of .parquet."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flashtrain.data.json_lines import json_lines, one_line
from flashtrain.data.parquet_rows import parquet_rows
from flashtrain.data.text_encoding import UTF_8, check_encoding, decode_text
from flashtrain.errors import UserError, printable
from flashtrain.files.compressed import BROKEN_FILE_ERRORS, COMPRESSIONS, DEFAULT_LONGEST, read_whole

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger(__name__)

WHOLE_FILE_FORMATS = (".txt", ".md")
FORMATS = (*WHOLE_FILE_FORMATS, ".jsonl", ".parquet")
READABLE = f"{', '.join(FORMATS)} (all but .parquet also with {', '.join(COMPRESSIONS)})"

TYPICAL_RATIO = {".gz": 3.0, ".xz": 3.5, ".zst": 3.0, ".parquet": 2.0}
"""Bytes of text in a byte of file, roughly, for English and code."""

LONGEST = "data.longest_document"


class FilesSource:
    """A file, or every readable file below a folder in the order of their paths; hidden files are left out.

    path: file or folder. text_column: the field of .jsonl objects and .parquet rows that holds the text; rows where
    it is null are left out. encoding: of .txt, .md and .jsonl (text_encoding.check_encoding); in the first two, bytes
    that are not of it become U+FFFD, with one logged line naming the file and their number. longest_document: bytes,
    uncompressed, of a text file, a line of .jsonl or a text in .parquet: what is in memory at once.
    Raises UserError for a missing path, no readable file, a malformed file or line, a missing column, too long a
    document, an unknown encoding, and a file of which more than 1% is no text.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        text_column: str = "text",
        *,
        encoding: str = UTF_8,
        longest_document: int = DEFAULT_LONGEST,
    ) -> None:
        self.path = Path(path).expanduser()
        self.text_column = text_column
        self.encoding = check_encoding(encoding)
        self.longest_document = longest_document
        self._told: set[Path] = set()  # files whose replaced bytes were told of: they are read more than once

    def describe(self) -> str:
        return f"files in {self.path}" if self.path.is_dir() else f"file {self.path}"

    def fingerprint(self) -> str:
        # Without UTF-8's name: token caches of before there were others are found again.
        encoding = "" if self.encoding == UTF_8 else f"\nencoding {self.encoding}"
        digest = hashlib.sha256(f"files {self.text_column}{encoding}".encode())
        base = self.path if self.path.is_dir() else self.path.parent
        for path in self._files():
            status = path.stat()
            name = path.relative_to(base).as_posix()
            digest.update(f"\n{name} {status.st_size} {status.st_mtime_ns}".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def documents(self) -> Iterator[str]:
        for path in self._files():
            try:
                yield from self._read(path)
            except BROKEN_FILE_ERRORS as error:
                raise UserError(f"cannot read {path}: {one_line(error)}.") from error

    def approximate_bytes(self) -> int:
        ratio = (TYPICAL_RATIO.get(path.suffix.lower(), 1.0) * path.stat().st_size for path in self._files())
        return round(sum(ratio))

    def _files(self) -> list[Path]:
        if self.path.is_file():
            if _format(self.path) is None:
                raise UserError(f"{self.path} is of no format that is read: {READABLE}.")
            return [self.path]
        if not self.path.is_dir():
            raise UserError(f"no file or folder {self.path} (seen from {Path.cwd()}).")
        found = sorted(path for path in _walk(self.path) if _format(path) is not None)
        if not found:
            raise UserError(f"no readable file in {self.path}; what is read: {READABLE}.")
        return found

    def _read(self, path: Path) -> Iterator[str]:
        kind = _format(path)
        if kind == ".parquet":
            return self._read_parquet(path)
        if kind == ".jsonl":
            return self._read_jsonl(path)
        return self._read_whole(path)

    def _read_whole(self, path: Path) -> Iterator[str]:
        text, invalid = decode_text(read_whole(path, self.longest_document, LONGEST), path, self.encoding)
        if invalid and path not in self._told:
            self._told.add(path)
            where = printable(str(path))
            log.warning("%s: %s bytes are no %s and become U+FFFD", where, f"{invalid:,}", self.encoding.upper())
        yield text

    def _read_jsonl(self, path: Path) -> Iterator[str]:
        lines = json_lines(path, encoding=self.encoding, longest=self.longest_document, setting=LONGEST)
        for where, row, _ in lines:
            if not isinstance(row, dict):
                raise UserError(f"{where}: holds a JSON {_json_type(row)}, not an object with fields.")
            if self.text_column not in row:
                raise _no_column(where, self.text_column, row)
            text = row[self.text_column]
            if isinstance(text, str):
                yield text
            elif text is not None:
                raise UserError(f"{where}: '{self.text_column}' holds a JSON {_json_type(text)}, not text.")

    def _read_parquet(self, path: Path) -> Iterator[str]:
        def columns(schema: pyarrow.Schema) -> list[str]:
            if self.text_column not in schema.names:
                raise _no_column(str(path), self.text_column, schema.names)
            kind = schema.field(self.text_column).type
            if str(kind) not in ("string", "large_string"):
                raise UserError(f"{path}: column '{self.text_column}' holds {kind}, not text.")
            return [self.text_column]

        for row in parquet_rows(path, columns, longest=self.longest_document, setting=LONGEST):
            if row[self.text_column] is not None:
                yield row[self.text_column]


def _format(path: Path) -> str | None:
    """Which of FORMATS the file has by its name, compression aside; None when it is not read."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if not suffixes:
        return None
    if suffixes[-1] in COMPRESSIONS:
        inner = suffixes[-2] if len(suffixes) > 1 else None
        return inner if inner in FORMATS and inner != ".parquet" else None
    return suffixes[-1] if suffixes[-1] in FORMATS else None


def _walk(folder: Path) -> Iterator[Path]:
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


def _no_column(where: str, given: str, possible: Iterable[str]) -> UserError:
    columns = ", ".join(map(str, possible)) or "none"
    return UserError(f"{where}: no column '{given}'. Possible: {columns} (set it with data.text_column).")


def _json_type(value: object) -> str:
    names = {bool: "true or false", int: "number", float: "number", str: "string", list: "list", dict: "object"}
    return names.get(type(value), "null")
