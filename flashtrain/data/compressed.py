"""Opening a file that may be compressed: the suffix says how (.gz, .xz, .zst)."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard

COMPRESSIONS = (".gz", ".xz", ".zst")

BROKEN_FILE_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError)
"""What reading a damaged or truncated compressed file raises."""

CHUNK = 1 << 20


def open_binary(path: Path) -> BinaryIO:
    """The file's content as uncompressed bytes. Raises one of BROKEN_FILE_ERRORS, now or while it is read."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if suffix == ".xz":
        return cast(BinaryIO, lzma.open(path, "rb"))
    if suffix == ".zst":
        return cast(BinaryIO, io.BufferedReader(_ZstdFile(path), CHUNK))
    return path.open("rb")


class _ZstdFile(io.RawIOBase):
    """Reads .zst files of one or many frames, and notices one that ends midway; zstandard's own reader does not."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("rb")
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._frame_begun = False
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._frame.unused_data if self._frame.eof else b""
            packed = packed or self._file.read(CHUNK)
            if not packed:
                if self._frame_begun and not self._frame.eof:
                    raise EOFError("the file ends in the middle of a compressed frame")
                return 0
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._frame_begun = True
            self._ready = self._frame.decompress(packed)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
