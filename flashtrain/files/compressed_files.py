"""Files that may be compressed, opened as what they hold: the suffix says how (.gz, .xz, .zst)."""

from __future__ import annotations

import io
from _compression import DecompressReader
from collections.abc import Iterator
from contextlib import contextmanager
from gzip import GzipFile
from lzma import LZMADecompressor
from pathlib import Path
from typing import BinaryIO, cast

COMPRESSIONS = (".gz", ".xz", ".zst")


@contextmanager
def open_binary(path: Path) -> Iterator[BinaryIO]:
    """The file's content, uncompressed. A file that is damaged or cut short raises its library's error, now or while
    it is read."""
    suffix = path.suffix.lower()
    with path.open("rb") as file:
        if suffix == ".gz":
            yield cast(BinaryIO, GzipFile(fileobj=file, mode="rb"))
        elif suffix == ".xz":
            # lzma.open of Python 3.11 takes whatever follows a stream and is none for the end of the text, silently.
            yield cast(BinaryIO, io.BufferedReader(DecompressReader(file, LZMADecompressor)))
        elif suffix == ".zst":
            from pyarrow import CompressedInputStream  # slow to import

            # zstandard 0.25 and fsspec 2026.9 read a file that was cut short as an empty or a shorter text, silently.
            yield cast(BinaryIO, io.BufferedReader(CompressedInputStream(file, "zstd")))
        else:
            yield cast(BinaryIO, file)
