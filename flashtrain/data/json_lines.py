"""The lines of .jsonl files, compressed or not, for every reader of such files: bounded, each failure one UserError."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from flashtrain.data.text_encoding import UTF_8, Utf8Reader
from flashtrain.errors import UserError
from flashtrain.files.compressed import BROKEN_FILE_ERRORS, DEFAULT_LONGEST, UnpackedSize, open_binary, too_long
from flashtrain.files.foreign_files import parse_json

MOST_VALUES = 10_000_000
"""Commas and brackets of a line: a value of a byte or two becomes an object of fifty, or more."""


def json_lines(
    path: Path, *, encoding: str = UTF_8, longest: int = DEFAULT_LONGEST, setting: str | None = None
) -> Iterator[tuple[str, Any, int]]:
    """Of each line that is not blank: where it stands (FILE:LINE), its value, and its bytes.

    encoding: as text_encoding.check_encoding gives it. longest: bytes of a line; setting: its name, where it has one.
    UserError: a file that cannot be read, a line that is too long, is no JSON, or is no text of this encoding.
    """
    try:
        with open_binary(path) as file:
            size = UnpackedSize(path)
            for number, line in enumerate(_lines(file, path, encoding, longest, setting), start=1):
                size.add(len(line))
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    yield f"{path}:{number}", parsed_line(line, f"{path}:{number}"), len(line)
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
