"""Opening a file that may be compressed: the suffix says how (.gz, .xz, .zst).

Content is unpacked as it is read, some MiB at a time: a small file may hold gigabytes, and its reader says how many of
them it wants. What a file may ask of the memory to be unpacked at all is bounded here.
"""

from __future__ import annotations

import io
import lzma
import zlib
from abc import abstractmethod
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard

from flashtrain.errors import UserError

COMPRESSIONS = (".gz", ".xz", ".zst")

BROKEN_FILE_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError)
"""What reading a damaged or truncated compressed file raises."""

CHUNK = 1 << 20
ZSTD_CHUNK = 512  # its decompressor gives all that its input holds at once, up to 32,768 times as much
GZIP_CHUNK = 4096  # likewise, up to 1,032 times as much
MOST_PADDING = 1 << 20  # bytes of zeros after a frame; tapes have blocks of 10 KiB, a hole in a file may be terabytes
LARGEST_WINDOW = 128 << 20  # bytes that unpacking may keep: as `zstd` itself; twice what the strongest `xz -9` needs
DEFAULT_LONGEST = 256 << 20  # bytes of one document, where no setting says otherwise
MOST_TIMES = 1_000  # a file's own size, that all of its texts may have: compressed text has 2 to 10, repeated text 100


def open_binary(path: Path) -> BinaryIO:
    """The file's content as uncompressed bytes. Raises one of BROKEN_FILE_ERRORS, now or while it is read."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, io.BufferedReader(_GzipFile(path), CHUNK))
    if suffix == ".xz":
        return cast(BinaryIO, io.BufferedReader(_XzFile(path), CHUNK))
    if suffix == ".zst":
        return cast(BinaryIO, io.BufferedReader(_ZstdFile(path), CHUNK))
    return path.open("rb")


def read_whole(path: Path, longest: int, setting: str | None = "data.longest_document") -> bytearray:
    """The file's content, of at most `longest` bytes uncompressed. Raises UserError above, else as open_binary.

    setting: its name in the error; None where there is none.
    """
    content = bytearray()
    with open_binary(path) as file:
        while piece := file.read(min(CHUNK, longest + 1 - len(content))):
            content += piece
            if len(content) > longest:
                raise too_long(str(path), longest, setting)
    return content


def too_long(where: str, longest: int, setting: str | None = "data.longest_document") -> UserError:
    """The error of a document of more than `longest` bytes."""
    more = f"; {setting}=... allows more" if setting else ""
    return UserError(f"{where}: one document of more than {longest:,} bytes of text{more}.")


class UnpackedSize:
    """Counts what a file's texts come to: a small one of repeated rows may hold terabytes, each text of fair length."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left = max(DEFAULT_LONGEST, MOST_TIMES * path.stat().st_size)

    def add(self, count: int) -> None:
        """UserError: the file's texts are more than MOST_TIMES its size by now, and more than DEFAULT_LONGEST."""
        self._left -= count
        if self._left < 0:
            raise UserError(
                f"{self._path}: unpacks to more than {MOST_TIMES:,} times its size: it repeats itself, or is a bomb;"
                " if it is meant, give it uncompressed, as .jsonl."
            )


class _UnpackedFile(io.RawIOBase):
    """A file of one or many compressed frames, none of which may end midway."""

    chunk = CHUNK
    padding = b""  # bytes that may stand between two frames

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("rb")
        self._frame: Any = None  # the decompressor of the current frame
        self._ready = memoryview(b"")

    @abstractmethod
    def _new_frame(self) -> Any: ...

    def _unpacked(self, packed: bytes) -> bytes:
        """What the frame gives for more input, or without any."""
        return cast(bytes, self._frame.decompress(packed))

    def _begin_frame(self) -> bool:
        """Begin the next frame with what the last one left over; False where the file ends."""
        packed = b"" if self._frame is None else self._frame.unused_data.lstrip(self.padding)
        skipped = 0
        while not packed:
            read = self._file.read(self.chunk)
            packed = read if self._frame is None else read.lstrip(self.padding)
            skipped += len(read) - len(packed)
            if skipped > MOST_PADDING:
                raise OSError(f"more than {MOST_PADDING:,} zeros follow a compressed frame")
            if not read:
                return False
        self._frame = self._new_frame()
        self._ready = memoryview(self._unpacked(packed))
        return True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """As many bytes as there are, or as fit."""
        while not self._ready:
            if self._frame is None or self._frame.eof:
                if not self._begin_frame():
                    return 0
                continue
            hungry = getattr(self._frame, "needs_input", True)  # lzma's may have more of what it got
            packed = self._file.read(self.chunk) if hungry else b""
            if hungry and not packed:
                raise EOFError("the file ends in the middle of a compressed frame")
            self._ready = memoryview(self._unpacked(packed))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _ZstdFile(_UnpackedFile):
    """zstandard's own reader does not notice a frame that ends midway."""

    chunk = ZSTD_CHUNK

    def _new_frame(self) -> Any:
        return zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj()


class _GzipFile(_UnpackedFile):
    """gzip's own reader goes through the zeros after a frame one by one, hours for a hole of some GiB."""

    chunk = GZIP_CHUNK
    padding = b"\0"

    def _new_frame(self) -> Any:
        return zlib.decompressobj(zlib.MAX_WBITS | 16)  # with gzip's header, and its sum and length at the end


class _XzFile(_UnpackedFile):
    """lzma's own reader knows no limit of memory."""

    padding = b"\0"

    def _new_frame(self) -> Any:
        return lzma.LZMADecompressor(memlimit=LARGEST_WINDOW)

    def _unpacked(self, packed: bytes) -> bytes:
        return cast(bytes, self._frame.decompress(packed, CHUNK))
