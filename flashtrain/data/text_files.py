"""Text in files: encodings, lines of JSON, rows of parquet.

Bytes that a file's name calls text: decoded, counted where they are none, refused where they are many.

An encoding is one of Python's text codecs by any of its names; UTF-8 unless told otherwise.

The lines of .jsonl files, compressed or not, for every reader of such files: bounded, each failure one UserError.

The rows of a .parquet file, read in pieces; whatever is wrong with it is one UserError.
"""

from __future__ import annotations

import codecs
import io
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from encodings.aliases import aliases
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from flashtrain.errors import UserError, unknown
from flashtrain.files.foreign_files import (
    BROKEN_FILE_ERRORS,
    DEFAULT_LONGEST,
    MadeBytes,
    UnpackedSize,
    open_binary,
    parse_json,
    too_long,
)

if TYPE_CHECKING:
    import pyarrow

UTF_8 = "utf-8"
MOST_INVALID = 0.01
"""Share of a file's bytes that may be no text; a single byte may be in any file, however short."""

COMMON = (UTF_8, "latin-1", "cp1252", "utf-16", "utf-16-le", "shift-jis", "gb18030", "euc-kr", "koi8-r", "mac-roman")
# Text codecs all the same, but of names on the internet and of Python's own source, which no file is written in.
_NO_FILE_ENCODINGS = ("idna", "punycode", "unicode-escape", "raw-unicode-escape", "undefined")
_OWN_BYTE_ORDER = {
    "utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
    "utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
}
# What files of text do not hold: NUL and other control characters, but for those from \a to \r and escape.
_CONTROLS = [chr(code) for code in range(32) if code not in (*range(7, 14), 27)]
_PIECE = 2**20


def check_encoding(name: str, setting: str = "data.encoding") -> str:
    """Python's own name of a text encoding. Raises UserError, naming the setting, for what is none."""
    try:
        b"x".decode(name, "replace")  # refuses codecs of other things than text, such as rot13 and base64
        found = codecs.lookup(name).name
    except (LookupError, ValueError, AttributeError):
        found = "undefined"
    if found.replace("_", "-") in _NO_FILE_ENCODINGS:
        known = {word.replace("_", "-") for word in aliases.values() if _decodes_text(word)}
        raise unknown(setting, name, known | set(COMMON), listed=(*COMMON, "and Python's other text encodings"))
    return found


class Decoded(NamedTuple):
    """A text, and how many of its bytes were none: U+FFFD stands for them."""

    text: str
    invalid: int


def decode_text(content: bytes | bytearray, path: Path, encoding: str = UTF_8, remedy: str | None = None) -> Decoded:
    """The text of a whole file, without the byte order mark.

    encoding: as check_encoding gives it. remedy: what to do about a file in another one (None: data.encoding).
    Raises UserError, naming the file and the share, where more than MOST_INVALID of the bytes are no text: undecodable,
    or control characters that stand in no text (so are archives, pictures and programs found whose name says text).
    """
    if encoding in _OWN_BYTE_ORDER and content and not content.startswith(_OWN_BYTE_ORDER[encoding]):
        # Python would read such a file in this machine's byte order, and find some text in almost any bytes.
        raise UserError(f"{path} has no byte order mark: say data.encoding={encoding}-le or {encoding}-be.")
    allowed = max(1, int(MOST_INVALID * len(content)))
    try:
        text = content.decode(encoding)
    except UnicodeError:
        return _counted(content, path, encoding, allowed, remedy)
    controls = _controls_in(text)
    if controls > allowed:
        raise _no_text(content, path, encoding, remedy, controls, len(content))
    return Decoded(text.removeprefix("\ufeff"), 0)


class Utf8Reader(MadeBytes):
    """The UTF-8 of a file in another encoding, for readers of lines. Raises UserError at a byte that is no text."""

    def __init__(self, file: BinaryIO, path: Path, encoding: str) -> None:
        super().__init__(file)
        self._path, self._encoding = path, encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._begun = False

    def _make(self) -> bool:
        piece = self._file.read(_PIECE)
        try:
            text = self._decoder.decode(piece, final=not piece)
        except UnicodeError as error:
            reason = error.reason if isinstance(error, UnicodeDecodeError) else error
            raise UserError(
                f"{self._path} is no {self._encoding} text ({reason}): say in data.encoding what it is."
            ) from error
        if text and not self._begun:
            text, self._begun = text.removeprefix("\ufeff"), True
        self._ready = memoryview(text.encode("utf-8", errors="replace"))
        return bool(piece or text)


def _decodes_text(name: str) -> bool:
    try:
        b"x".decode(name, "replace")
    except LookupError:
        return False
    return codecs.lookup(name).name.replace("_", "-") not in _NO_FILE_ENCODINGS


def _counted(content: bytes | bytearray, path: Path, encoding: str, allowed: int, remedy: str | None) -> Decoded:
    """Piece by piece, so that a file that is no text is refused before all of it was decoded."""
    decoder = codecs.getincrementaldecoder(encoding)(_COUNTED)
    view = memoryview(content)
    parts: list[str] = []
    _seen.invalid = controls = 0
    for begin in range(0, len(view), _PIECE):
        end = min(begin + _PIECE, len(view))
        try:
            parts.append(decoder.decode(bytes(view[begin:end]), final=end == len(view)))
        except UnicodeError as error:  # some codecs say so of the whole, not of a byte
            raise UserError(f"{path} is no {encoding} text: {error}.") from error
        controls += _controls_in(parts[-1])
        if _seen.invalid + controls > allowed:
            raise _no_text(content, path, encoding, remedy, _seen.invalid + controls, end)
    return Decoded("".join(parts).removeprefix("\ufeff"), _seen.invalid)


def _controls_in(text: str) -> int:
    return sum(text.count(control) for control in _CONTROLS)


def _no_text(
    content: bytes | bytearray, path: Path, encoding: str, remedy: str | None, bad: int, looked: int
) -> UserError:
    share = bad / looked
    of = "its bytes" if looked == len(content) else f"its first {looked:,} bytes"
    name = "UTF-8" if encoding == UTF_8 else encoding
    guess = "latin-1"
    for wide, marks in _OWN_BYTE_ORDER.items():
        guess = wide if bytes(content[:4]).startswith(marks) else guess
    if encoding != UTF_8:
        remedy = remedy or "is it in another encoding than data.encoding says, or no text at all?"
    remedy = remedy or f"if it is in another encoding, say data.encoding={guess}."
    return UserError(f"{path}: {share:{'.0%' if share >= 0.1 else '.1%'}} of {of} are no {name} text; {remedy}")


_seen = threading.local()
_COUNTED = "flashtrain.replace_and_count"


def _replace_and_count(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    _seen.invalid += error.end - error.start
    return "\ufffd", error.end


codecs.register_error(_COUNTED, _replace_and_count)

MOST_VALUES = 10_000_000
"""Commas and brackets of a line: a value of a byte or two becomes an object of fifty, or more."""


def json_lines(
    path: Path,
    *,
    encoding: str = UTF_8,
    longest: int = DEFAULT_LONGEST,
    setting: str | None = None,
    broken: Callable[[UserError], None] | None = None,
) -> Iterator[tuple[str, Any, int]]:
    """Of each line that is not blank: where it stands (FILE:LINE), its value, and its bytes.

    encoding: as text_encoding.check_encoding gives it. longest: bytes of a line; setting: its name, where it has one.
    broken: is told of a line that is no JSON, which is passed over; None: that is an error.
    UserError: a file that cannot be read, a line that is too long, is no JSON, or is no text of this encoding.
    """
    try:
        with open_binary(path) as file:
            size = UnpackedSize(path)
            for number, line in enumerate(_lines(file, path, encoding, longest, setting), start=1):
                size.add(len(line))
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if not line.strip():
                    continue
                try:
                    value = parsed_line(line, f"{path}:{number}")
                except UserError as error:
                    if broken is None:
                        raise
                    broken(error)
                    continue
                yield f"{path}:{number}", value, len(line)
    except BROKEN_FILE_ERRORS as error:
        raise UserError(f"cannot read {path}: {one_line(error)}.") from error


def parsed_line(line: bytes, where: str) -> Any:
    """The value on a line. where: FILE:LINE. UserError: no JSON, or bytes that are not UTF-8.

    The parser's own place is left out: it counts lines of what it was given, which is one line.
    """
    if line.count(b",") + line.count(b"[") + line.count(b"{") > MOST_VALUES:
        raise UserError(f"{where}: more than {MOST_VALUES:,} commas and brackets on a line; give it as several lines.")
    try:
        return parse_json(line.rstrip(b"\r\n"), where)  # or an unclosed string is told as a control character in it
    except UserError as error:
        cause = error.__cause__
        if isinstance(cause, json.JSONDecodeError):
            words = cause.msg.removesuffix(" at").removesuffix(" starting")  # where the place would follow
        elif isinstance(cause, UnicodeDecodeError):
            words = f"byte {cause.start + 1} of the line is no UTF-8 ({cause.reason})"
        elif isinstance(cause, RecursionError):
            words = "it is nested too deeply"
        else:
            words = " ".join(str(cause).split())
        raise UserError(f"{where}: not a JSON object on a line: {words}.") from cause


def one_line(error: BaseException) -> str:
    """The first line of what a library says of an error, without its full stop."""
    text = str(error) or type(error).__name__
    return text.splitlines()[0].rstrip(".")


def _lines(file: BinaryIO, path: Path, encoding: str, longest: int, setting: str | None) -> Iterator[bytes]:
    lines = file if encoding == UTF_8 else cast(BinaryIO, io.BufferedReader(Utf8Reader(file, path, encoding)))
    number = 0
    while line := lines.readline(longest + 1):
        number += 1
        if len(line) > longest:
            raise too_long(f"{path}:{number}", longest, setting)
        yield line


ROWS = 256
BATCH_BYTES = 2**26  # of text at once, by what the file says of its texts' mean length


def parquet_rows(
    path: Path,
    columns: Callable[[pyarrow.Schema], Sequence[str]],
    *,
    longest: int = DEFAULT_LONGEST,
    setting: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Each row's values of the columns that `columns` names, from the file's schema; texts, numbers and nulls only.

    longest: bytes of one text; setting: its name, where it has one.
    UserError: no parquet, a damaged one, a column that holds something else, a longer text, far more text than file.
    """
    import pyarrow.parquet  # here, since it is slow to import and most sources need none of it

    try:
        with pyarrow.parquet.ParquetFile(_opened(path)) as table:
            names = list(columns(table.schema_arrow))
            for name in names:
                _check_plain(path, name, table.schema_arrow.field(name).type)
            texts = [name for name in names if _holds_text(table.schema_arrow.field(name).type)]
            rows, shared = _plan(path, table.metadata, texts, longest, setting)
        # A long text that many rows share stays one text in memory: as a number in a dictionary, as the file has it.
        with pyarrow.parquet.ParquetFile(_opened(path), read_dictionary=shared) as table:
            size = UnpackedSize(path)
            for batch in table.iter_batches(batch_size=rows, columns=names):
                columns_of = [_values(path, batch.column(name), longest, setting, size) for name in names]
                for values in zip(*columns_of, strict=True):
                    yield dict(zip(names, values, strict=True))
    except UserError:
        raise
    except parquet_errors() as error:
        raise UserError(f"cannot read {path} as parquet: {one_line(error)}.") from error


def _opened(path: Any) -> Any:
    """What pyarrow opens: a path itself, what stands for one opened."""
    return path if isinstance(path, Path) else path.open("rb")


def parquet_errors() -> tuple[type[Exception], ...]:
    """What pyarrow raises of a file: it believes what one says of itself, and that may be anything odd."""
    import pyarrow

    return (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError)


def is_plain(kind: pyarrow.DataType) -> bool:
    """Whether a column of this type holds texts, numbers, true and false."""
    import pyarrow

    types = pyarrow.types
    return _holds_text(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def _holds_text(kind: pyarrow.DataType) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind))


def _check_plain(path: Path, name: str, kind: pyarrow.DataType) -> None:
    if not is_plain(kind):
        raise UserError(f"{path}: column '{name}' holds {kind}, not text.")


def _plan(
    path: Path, metadata: pyarrow.parquet.FileMetaData, texts: Sequence[str], longest: int, setting: str | None
) -> tuple[int, list[str]]:
    """Rows of a batch, fewer where the texts are long; and which texts are read as numbers in a dictionary."""
    rows, shared = ROWS, set(texts)
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            name = column.path_in_schema
            if name not in texts or not column.num_values:
                continue
            mean = column.total_uncompressed_size // column.num_values
            if mean > longest:
                raise too_long(str(path), longest, setting)
            rows = min(rows, max(1, BATCH_BYTES // max(1, mean)))
            if "DELTA_BYTE_ARRAY" in column.encodings:
                rows = 1  # a few bytes may stand for a long text: the one before, and some more
            if any(encoding.startswith("DELTA") for encoding in column.encodings):
                shared.discard(name)  # pyarrow cannot
    return rows, sorted(shared)


def _values(path: Path, column: pyarrow.Array, longest: int, setting: str | None, size: UnpackedSize) -> Iterator[Any]:
    import pyarrow

    if not isinstance(column, pyarrow.DictionaryArray) and not _holds_text(column.type):
        yield from column.to_pylist()
        return
    texts, places = column, iter(range(len(column)))
    if isinstance(column, pyarrow.DictionaryArray):
        texts, places = column.dictionary, iter(column.indices.to_pylist())
    for place in places:
        text = None if place is None else texts[place]
        if text is None or not text.is_valid:
            yield None
            continue
        if text.as_buffer().size > longest:
            raise too_long(str(path), longest, setting)
        size.add(text.as_buffer().size)
        yield text.as_py()
