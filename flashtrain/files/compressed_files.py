"""Files that may be compressed, opened as what they hold: the suffix says how (.gz, .xz, .zst)."""

from __future__ import annotations

import io
import zlib
from _compression import DecompressReader
from collections.abc import Iterator
from contextlib import contextmanager
from gzip import GzipFile
from lzma import LZMADecompressor, LZMAError
from pathlib import Path
from typing import BinaryIO, cast

from flashtrain.errors import UserError, first_line

COMPRESSIONS = (".gz", ".xz", ".zst")


@contextmanager
def open_binary(path: Path) -> Iterator[BinaryIO]:
    """The file's content, uncompressed. Raises UserError, naming the file, where it is damaged or cut short."""
    with path.open("rb") as file:
        try:
            yield _uncompressed(file, path.suffix.lower())
        except (OSError, EOFError, LZMAError, zlib.error) as error:  # which do not name the file
            raise UserError(f"cannot read {path}: {first_line(error)}.") from error


def _uncompressed(file: BinaryIO, suffix: str) -> BinaryIO:
    if suffix == ".gz":
        return cast(BinaryIO, GzipFile(fileobj=file, mode="rb"))
    if suffix == ".xz":
        # lzma.open of Python 3.11 takes whatever follows a stream and is none for the end of the text, silently.
        return cast(BinaryIO, io.BufferedReader(DecompressReader(file, LZMADecompressor)))
    if suffix == ".zst":
        from pyarrow import CompressedInputStream  # slow to import

        # zstandard 0.25 and fsspec 2026.9 read a file that was cut short as an empty or a shorter text, silently.
        return cast(BinaryIO, io.BufferedReader(CompressedInputStream(file, "zstd")))
    return file
