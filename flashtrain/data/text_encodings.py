"""From the bytes of a file to its text: decoded strictly, so that what is no text has its place named.

datasets 5.2 makes line feeds of carriage returns, keeps a byte order mark as text, and names no file in its error.
"""

from __future__ import annotations

import codecs
import threading
from collections.abc import Iterator
from encodings.aliases import aliases
from typing import BinaryIO

from flashtrain.errors import UserError, unknown

UTF_8 = "utf-8"
ERRORS = ("strict", "replace")
COMMON = (UTF_8, "latin-1", "cp1252", "utf-16", "utf-16-le", "shift-jis", "gb18030", "euc-kr", "koi8-r", "mac-roman")

_PIECE = 2**20  # bytes
_MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_COUNTED = "flashtrain.replace_and_count"
_found = threading.local()


def check_encoding(name: str) -> str:
    """Python's own name of a text encoding. Raises UserError for what is none."""
    try:
        b"x".decode(name, "replace")  # refuses codecs of other things than text, such as rot13 and base64
        return codecs.lookup(name).name
    except (LookupError, ValueError) as error:
        known = {alias.replace("_", "-") for alias in aliases.values() if _is_of_text(alias)} | set(COMMON)
        listed = (*COMMON, "and Python's other text encodings")
        raise unknown("data.encoding", name, known, listed=listed) from error


def _is_of_text(name: str) -> bool:
    try:
        return bool(b"x".decode(name, "replace"))
    except (LookupError, ValueError):
        return False


class Decoder:
    """The text of one file, whose name is `path`, piece by piece and without its byte order mark.

    encoding: any of Python's text encodings. errors: "strict", or "replace", for U+FFFD in place of bytes that are no
    text, which `replaced` counts.
    """

    def __init__(self, path: object, encoding: str = UTF_8, errors: str = "strict") -> None:
        self.path, self.encoding, self.errors = path, encoding, errors
        self.replaced = 0

    def pieces(self, file: BinaryIO) -> Iterator[str]:
        """UserError, with the place: bytes that are no text."""
        decoder = codecs.getincrementaldecoder(self.encoding)(_COUNTED if self.errors == "replace" else "strict")
        offset, line = 0, 1
        ended = False
        while not ended:
            piece = file.read(_PIECE)
            ended = not piece
            waiting = len(decoder.getstate()[0])  # bytes of a character that the last piece cut
            _found.bytes = 0
            try:
                text = decoder.decode(piece, final=ended)
            except UnicodeError as error:
                raise self._no_text(error, piece if offset == 0 else b"", offset - waiting, line) from error
            self.replaced += _found.bytes
            if offset == 0:
                text = text.removeprefix("\ufeff")
            if "\0" in text and self.errors == "strict":
                line += text[: text.index("\0")].count("\n")
                raise UserError(f"{self.path}, line {line}: a zero byte, which no text has.{self._remedy(b'')}")
            offset += len(piece)
            line += text.count("\n")
            yield text

    def lines(self, file: BinaryIO) -> Iterator[str]:
        """The text's lines, without what ends them. UserError as of `pieces`."""
        rest = ""
        for piece in self.pieces(file):
            *whole, rest = (rest + piece).split("\n")
            yield from (line.removesuffix("\r") for line in whole)
        if rest:
            yield rest

    def _no_text(self, error: UnicodeError, begin: bytes, offset: int, line: int) -> UserError:
        if not isinstance(error, UnicodeDecodeError):  # of a file in UTF-16 without its mark
            return UserError(f"{self.path} is no {self.encoding} text: {error}.{self._remedy(begin)}")
        before = error.object[: error.start].decode(self.encoding, "ignore")
        return UserError(
            f"{self.path}, line {line + before.count(chr(10))}: byte {offset + error.start:,} is no {self.encoding} "
            f"text ({error.reason}).{self._remedy(begin)}"
        )

    def _remedy(self, begin: bytes) -> str:
        guess = next((name for mark, name in _MARKS.items() if begin.startswith(mark)), "latin-1, utf-16-le, ...")
        return f" Name the file's encoding (data.encoding={guess}), or read on with data.encoding_errors=replace."


def _replace_and_count(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    _found.bytes += error.end - error.start
    return "\ufffd", error.end


codecs.register_error(_COUNTED, _replace_and_count)
