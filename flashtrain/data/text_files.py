"""Read documents from text files: each .jsonl line, .parquet row and file of
other text is a document."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import logging
import lzma
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, BinaryIO, cast

from flashtrain.data.sources import text_in
from flashtrain.data.split_names import SplitFiles
from flashtrain.errors import UserError, first_line, unknown

log = logging.getLogger(__name__)

UTF_8 = "utf-8"
ENCODINGS = (
    UTF_8,
    "latin-1",
    "cp1252",
    "utf-16",
    "utf-16-le",
    "shift-jis",
    "gb18030",
    "euc-kr",
    "koi8-r",
    "mac-roman",
)
COMPRESSIONS = (".gz", ".xz", ".zst")
FORMATS = (".txt", ".md", ".jsonl", ".parquet")
# Bytes of text in a byte of file, roughly.
TYPICAL_RATIO = {".gz": 3.0, ".xz": 3.5, ".zst": 3.0, ".parquet": 2.0}
ROWS = 256  # rows of a .parquet file that are read at once
BLOCK = 8192  # bytes by which a file of another name is known as text

Row = tuple[str, dict[str, Any]]  # its place as text, and its fields


def check_encoding(name: str) -> str:
    """Return Python's normalized name of a text encoding. Raises UserError if Python has
    no such text encoding."""
    try:
        "x".encode(name)  # refuses codecs that do not encode text, such as rot13 and base64
        return codecs.lookup(name).name
    except (LookupError, ValueError) as error:
        listed = (*ENCODINGS, "and Python's other text encodings")
        raise unknown("data.encoding", name, ENCODINGS, listed=listed) from error


# Why not datasets 5.2: it turns carriage returns into line feeds, reads a byte order mark as text,
# makes datetime objects of texts that look like dates, and names no file in an error.
@dataclass
class TextReader:
    """Reads text and rows from files, given as Paths or RemoteFiles (files.found_files)."""

    encoding: str = UTF_8  # see FilesSource
    errors: str = "strict"  # encoding_errors of FilesSource
    # For each file how many U+FFFD replaced invalid bytes.
    replaced: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.encoding = check_encoding(self.encoding)

    def text(self, path: Any) -> str:
        """Return the whole text of a file. Raises UserError with the place of the first
        bytes that are not text."""
        with opened(path) as file:
            return self._decoded(file.read(), path)

    def is_text(self, path: Any) -> bool:
        """Return whether a file's first block is text; false for an empty file. Raises UserError if
        the file cannot be read."""
        with opened(path) as file:
            block = file.read(BLOCK)
        try:
            decoder = codecs.getincrementaldecoder(self.encoding)(self.errors)
            return bool(block) and "\0" not in decoder.decode(block, len(block) < BLOCK)
        except UnicodeError:
            return False

    def rows(
        self,
        path: Any,
        column: str | None = None,
        broken: Callable[[UserError], None] | None = None,
    ) -> Iterator[Row]:
        """Yield (place, row) for each row of a .jsonl or .parquet file; the place is a
        text such as "a.jsonl:12".

        Args:
            path: The file.
            column: Read only this column of a .parquet file, if it has the
                column (None: all columns).
            broken: Called with the error of a line that is not a JSON object, which is
                skipped; None: raise it.

        Raises:
            UserError: A line is not a JSON object, or some bytes are not text.
        """
        if path.suffix.lower() == ".parquet":
            yield from _table_rows(path, column)
            return
        for number, line in self._lines(path):
            if line.strip():
                where = f"{path}:{number}"
                try:
                    row = self._object(line, path)
                except ValueError as error:
                    found = UserError(
                        f"{where}: expected one JSON object per line: "
                        f"{getattr(error, 'msg', error)}."
                    )
                    if broken is None:
                        raise found from error
                    broken(found)
                else:
                    yield where, row

    def _object(self, line: str, path: Any) -> dict[str, Any]:
        row = json.loads(line)
        if "\\ud" in line.lower():  # JSON can hold half of a surrogate pair, which text cannot
            text = json.dumps(row, ensure_ascii=False)
            whole = text.encode(errors=self.errors)
            self.replaced[str(path)] += whole.count(b"?") - text.count("?")
            row = json.loads(whole)
        if not isinstance(row, dict):
            raise ValueError(f"found a {type(row).__name__}")
        return row

    def _lines(self, path: Any) -> Iterator[tuple[int, str]]:
        with opened(path) as file:
            # Such as UTF-16: its bytes cannot be split into lines.
            if "\n".encode(self.encoding) != b"\n":
                yield from enumerate(self._decoded(file.read(), path).split("\n"), start=1)
                return
            offset = 0
            for number, line in enumerate(file, start=1):
                yield number, self._decoded(line, path, offset, number)
                offset += len(line)

    def _decoded(self, data: bytes, path: Any, offset: int = 0, line: int = 1) -> str:
        """Decode bytes of a file to text, without a byte order mark; `offset` and `line` say where
        in the file they begin, for errors."""

        # bytes.decode would guess the byte order of UTF-16 without a mark.
        def decode(errors: str) -> str:
            return codecs.getincrementaldecoder(self.encoding)(errors).decode(data, True)

        try:
            text = decode("strict")
        except UnicodeError as error:
            if self.errors == "strict" or not isinstance(error, UnicodeDecodeError):
                begin = getattr(error, "start", 0)
                line += data[:begin].decode(self.encoding, "ignore").count("\n")
                what = (
                    f"byte {offset + begin:,} is not {self.encoding} text "
                    f"({getattr(error, 'reason', error)})"
                )
                raise self._no_text(path, line, what, data) from error
            text = decode("replace")
            self.replaced[str(path)] += text.count("\ufffd") - decode("ignore").count("\ufffd")
        if "\0" in text and self.errors == "strict":
            line += text[: text.index("\0")].count("\n")
            raise self._no_text(path, line, "found a zero byte, which text does not contain", data)
        return text.removeprefix("\ufeff") if offset == 0 else text

    def _no_text(self, path: Any, line: int, what: str, data: bytes) -> UserError:
        marked = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return UserError(
            f"{path}, line {line}: {what}. Set the file's encoding (data.encoding="
            f"{'utf-16' if marked else 'latin-1, utf-16-le, ...'}), or use "
            "data.encoding_errors=replace."
        )


@contextmanager
def opened(path: Any) -> Iterator[BinaryIO]:
    """Open a file for reading bytes, decompressed. Raises UserError if it is damaged,
    truncated or unreadable."""
    try:
        with path.open("rb") as file:
            yield _uncompressed(file, path.suffix.lower())
    except UserError:
        raise
    except Exception as error:  # most libraries' errors do not name the file
        raise UserError(f"cannot read {path}: {first_line(error)}.") from error


def _uncompressed(file: BinaryIO, suffix: str) -> BinaryIO:
    if suffix == ".gz":
        return cast(BinaryIO, gzip.open(file))
    if suffix == ".xz":
        return cast(BinaryIO, lzma.open(file))
    if suffix == ".zst":
        # Slow to import; zstandard 0.25 and fsspec 2026.9 silently read a
        # truncated file as shorter.
        import pyarrow

        return cast(BinaryIO, io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd")))
    return file


def _table_rows(path: Any, column: str | None) -> Iterator[Row]:
    import pyarrow.parquet  # slow to import

    with opened(path) as file, pyarrow.parquet.ParquetFile(file) as table:
        columns = [column] if column in table.schema_arrow.names else None
        batches = table.iter_batches(batch_size=ROWS, columns=columns)
        for number, row in enumerate(
            (row for batch in batches for row in batch.to_pylist()), start=1
        ):
            yield f"{path}: row {number}", row


@dataclass
class FilesSource(SplitFiles):
    """A TextSource: a file, or all files of text below a folder, in the order of their paths.

    Left out are hidden files, those of ignored_files, and those that are named for
    another split (split_names).

    Raises:
        UserError: The path does not exist, no file is readable, a file or line is malformed, a
            column is missing, some bytes are not text, or the encoding is unknown.
    """

    # A file or folder, or an address that fsspec reads ("s3://bucket/folder")
    source: InitVar[str | os.PathLike[str]]
    # field of .jsonl objects and .parquet rows; rows with null are left out.
    text_column: str = "text"
    encoding: str = UTF_8  # of all but .parquet files
    # Or "replace": invalid bytes become U+FFFD, and a logged line counts them.
    encoding_errors: str = "strict"
    # Of the files to read in a folder, in the form of .gitignore's.
    patterns: str | Sequence[str] | None = None
    include_ignored: bool = False  # whether ignored_files are read too

    expected = (
        f"{', '.join(FORMATS)} (all but .parquet also with {', '.join(COMPRESSIONS)}) or other text"
    )

    def __post_init__(self, source: str | os.PathLike[str]) -> None:
        self.address = source if isinstance(source, str) and "://" in source else None
        self.path = Path(source).expanduser()
        self.reader = TextReader(self.encoding, self.encoding_errors)
        # files whose U+FFFD were logged: files are read more than once.
        self._logged: set[str] = set()
        # Of files whose names do not say it: folders are listed more than once.
        self._is_text: dict[str, bool] = {}

    def describe(self) -> str:
        if self.address is None and not self.path.is_dir():
            return f"file {self.path}"
        place = f"in {self.path}" if self.address is None else f"at {self.address}"
        return f"files {place}: {_by_ending(chain(*self.by_split().values()))}{self.left_out}"

    def fingerprint(self) -> str:
        reader, files = self.reader, self.files()
        encoding = "" if reader.encoding == UTF_8 else f"\nencoding {reader.encoding}"
        if reader.errors != "strict":
            encoding += f" {reader.errors}"
        if self.address is not None:
            contents = repr([(file.relative, file.size, file.version) for file in files])
        else:
            # When text is read: not for help or a plan.
            from flashtrain.files.content_hashes import hash_of_contents

            contents = hash_of_contents(
                self.path if self.path.is_dir() else self.path.parent, files
            )
        return hashlib.sha256(
            f"files {self.text_column}{encoding}\n{contents}".encode()
        ).hexdigest()

    def documents(self) -> Iterator[str]:
        return self._texts(self.files())

    def shards(self) -> list[Callable[[], Iterator[str]]]:
        """Return a function for each file; called, it yields the file's documents."""
        return [partial(self._texts, [file]) for file in self.files()]

    def approximate_bytes(self) -> int:
        return round(
            sum(
                TYPICAL_RATIO.get(file.suffix.lower(), 1.0) * file.stat().st_size
                for file in self.files()
            )
        )

    def _texts(self, files: list[Any]) -> Iterator[str]:
        for file in files:
            if format_of(file) not in (".jsonl", ".parquet"):
                yield self.reader.text(file)
                continue
            for where, row in self.reader.rows(file, self.text_column):
                text = text_in(row, self.text_column, where)
                if text is not None:
                    yield text
        self._log_replaced()

    def _log_replaced(self) -> None:
        new = {
            file: count
            for file, count in self.reader.replaced.items()
            if count and file not in self._logged
        }
        self.reader.replaced.clear()
        if new:
            self._logged |= new.keys()
            listed = ", ".join(f"{count:,} of {file}" for file, count in new.items())
            log.warning(
                "replaced %s invalid bytes by U+FFFD: %.500s", f"{sum(new.values()):,}", listed
            )

    def chosen(self, found: dict[PurePath, Any]) -> dict[PurePath, Any]:
        from pathspec import GitIgnoreSpec  # help needs neither

        from flashtrain.data.ignored_files import ignored_files

        place, named = PurePath(self.address or self.path), set(found)
        if list(found) != [PurePath(place.name)]:  # not a file that is named itself
            given = [self.patterns] if isinstance(self.patterns, str) else self.patterns or ["*"]
            spec = GitIgnoreSpec.from_lines(pattern.lower() for pattern in given)
            named = {name for name in found if spec.match_file(name.as_posix().lower())}
            if not self.include_ignored:
                named -= ignored_files(found, self.path if self.address is None else None)
        elif place.suffix == ".json":
            return {}
        read = {name: file for name, file in found.items() if name in named and self._reads(file)}
        left = _by_ending(name for name in found if name not in read)
        self.left_out = (
            f" (left out, as no text, ignored or not data.files: {left})" if left else ""
        )
        return read

    def _reads(self, file: Any) -> bool:
        if format_of(file) is None and str(file) not in self._is_text:
            self._is_text[str(file)] = self.reader.is_text(file)
        return self._is_text.get(str(file), True)


def _by_ending(files: Iterable[Any]) -> str:
    """Return a text that counts the files by their endings, the most frequent endings only."""
    counts = Counter(file.suffix.lower() or "without ending" for file in files)
    return f"{', '.join(f'{number:,} {ending}' for ending, number in counts.most_common()):.300}"


def format_of(file: Any) -> str | None:
    """Return the format that a file's name states, one of FORMATS (a.jsonl.gz: .jsonl); None if it
    states none."""
    before, last = ("", "", *(suffix.lower() for suffix in file.suffixes))[-2:]
    if last in COMPRESSIONS:
        return before if before in FORMATS[:-1] else None
    return last if last in FORMATS else None
