"""Bytes that a file's name calls text: decoded, counted where they are none, refused where they are many.

An encoding is one of Python's text codecs by any of its names; UTF-8 unless told otherwise.
"""

from __future__ import annotations

import codecs
import io
import threading
from encodings.aliases import aliases
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from flashtrain.errors import UserError, unknown

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
        known = {word.replace("_", "-") for word in aliases.values() if _is_text(word)}
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


class Utf8Reader(io.RawIOBase):
    """The UTF-8 of a file in another encoding, for readers of lines. Raises UserError at a byte that is no text."""

    def __init__(self, file: BinaryIO, path: Path, encoding: str) -> None:
        super().__init__()
        self._file, self._path, self._encoding = file, path, encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._begun = False
        self._ended = False
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """As many bytes as there are, or as fit."""
        while not self._ready and not self._ended:
            piece = self._file.read(_PIECE)
            self._ended = not piece
            try:
                text = self._decoder.decode(piece, final=self._ended)
            except UnicodeError as error:
                reason = error.reason if isinstance(error, UnicodeDecodeError) else error
                raise UserError(
                    f"{self._path} is no {self._encoding} text ({reason}): say in data.encoding what it is."
                ) from error
            if text and not self._begun:
                text, self._begun = text.removeprefix("\ufeff"), True
            self._ready = text.encode("utf-8", errors="replace")
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _is_text(name: str) -> bool:
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
