"""Arrays in .npy and .npz files that anybody may have written: mapped or read only once their header fits their size.

numpy believes a header: it makes an array of whatever size, and of objects where asked. Here the caller says what kind
of array it expects, and no byte is read beyond what the file has.
"""

from __future__ import annotations

import io
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

LONGEST_HEADER = 10_000  # bytes: numpy's own limit for headers that are not trusted

# numpy takes a header for a Python expression, and these are what odd expressions make it raise.
HEADER_ERRORS = (
    ValueError, TypeError, LookupError, SyntaxError, ArithmeticError, RecursionError, MemoryError, tokenize.TokenError,
)  # fmt: skip
# What zipfile raises for archives that are damaged, or of a kind that it does not read.
ARCHIVE_ERRORS = (
    OSError, EOFError, LookupError, ValueError, RuntimeError, ArithmeticError, MemoryError, struct.error, zlib.error,
    zipfile.BadZipFile,
)  # fmt: skip


class DamagedArrayError(ValueError):
    """A file that does not hold the array that is expected; its text says in which way."""


def map_npy(path: Path, dtype: str, dimensions: int = 1) -> np.ndarray:
    """The array in a .npy file, memory-mapped and read-only. dtype: as numpy writes it, such as "int64".

    Raises DamagedArrayError for anything but one array of this type, in C order, that fills the file to its end.
    """
    try:
        with path.open("rb") as file:
            shape = _read_header(file, dtype, dimensions)
            begin = file.tell()
        if path.stat().st_size != begin + math.prod(shape) * np.dtype(dtype).itemsize:
            raise DamagedArrayError(f"{path.name} is not as long as its header says")
        if 0 in shape:  # nothing can be mapped
            return np.zeros(shape, dtype)
        return np.memmap(path, dtype=dtype, mode="r", offset=begin, shape=shape)
    except OSError as error:
        raise DamagedArrayError(f"{path.name} cannot be read: {error.strerror or error}") from error


def npy_place(path: Path, dtypes: Sequence[str]) -> tuple[str, int, tuple[int, ...]]:
    """Which of these types a .npy file of one dimension has, the byte that its content begins at, and its shape.

    Raises DamagedArrayError for any other file, and one that is not as long as its header says; OSError.
    """
    with path.open("rb") as file:
        shape, _, kind = _header(file)
        begin = file.tell()
    found = next((name for name in dtypes if kind == np.dtype(name) and kind.fields is None), None)
    if found is None:
        raise DamagedArrayError(f"it holds {kind}")
    _check_shape(shape, False, 1)
    if path.stat().st_size != begin + math.prod(shape) * kind.itemsize:
        raise DamagedArrayError("it is not as long as its header says")
    return found, begin, shape


def read_npz(path: Path, wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, np.ndarray]:
    """Arrays of a .npz file, by name. wanted: the type and shape that each has.

    Raises DamagedArrayError for anything else; FileNotFoundError where there is no file.
    """
    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name, (dtype, shape) in wanted.items():
                size = math.prod(shape) * np.dtype(dtype).itemsize
                with archive.open(f"{name}.npy") as member:
                    content = io.BytesIO(member.read(LONGEST_HEADER + size + 1))
                fits = _read_header(content, dtype, len(shape)) == shape
                if not fits or len(content.getbuffer()) != content.tell() + size:
                    raise DamagedArrayError(f"{name} of {path.name} is of another shape than {shape}")
                found[name] = np.frombuffer(content.read(), dtype=dtype).reshape(shape)
    except (FileNotFoundError, DamagedArrayError):
        raise
    except ARCHIVE_ERRORS as error:
        raise DamagedArrayError(f"{path.name} cannot be read: {error}") from error
    return found


def read_whole_npz(path: Path, wanted: Mapping[str, int], most: int) -> dict[str, np.ndarray]:
    """Arrays of plain numbers of a .npz file, of whatever size, by name. wanted: the dimensions of each. most: bytes of
    all of them.

    Raises DamagedArrayError for anything else; FileNotFoundError where there is no file.
    """
    found, left = {}, most
    try:
        with zipfile.ZipFile(path) as archive:
            for name, dimensions in wanted.items():
                with archive.open(f"{name}.npy") as member:
                    content = member.read(left + 1)
                left -= len(content)
                if left < 0:
                    raise DamagedArrayError(f"it is too large: of its bytes at most {most:,} are read")
                found[name] = _array(content, dimensions, "biuf")
    except (FileNotFoundError, DamagedArrayError):
        raise
    except ARCHIVE_ERRORS as error:
        raise DamagedArrayError(f"{path.name} cannot be read: {error}") from error
    return found


def read_words(content: bytes) -> list[list[str]]:
    """The rows of a .npy file's table of text. Raises DamagedArrayError for another array."""
    return [
        [word if isinstance(word, str) else word.decode("latin-1") for word in row]
        for row in _array(content, 2, "US").tolist()
    ]


def _array(content: bytes, dimensions: int, kinds: str) -> np.ndarray:
    """The array of a .npy file's bytes, of one of these kinds of type and of as many bytes as its header says."""
    file = io.BytesIO(content)
    shape, fortran, kind = _header(file)
    if kind.kind not in kinds or kind.hasobject or kind.fields is not None:
        raise DamagedArrayError(f"it holds {kind}")
    _check_shape(shape, fortran, dimensions)
    if len(content) != file.tell() + math.prod(shape) * kind.itemsize:
        raise DamagedArrayError("it is not as long as its header says")
    return np.frombuffer(content, dtype=kind, offset=file.tell()).reshape(shape)


def _read_header(file: BinaryIO, dtype: str, dimensions: int) -> tuple[int, ...]:
    """The shape that the header tells; the file then stands at the content. Raises DamagedArrayError."""
    shape, fortran, kind = _header(file)
    if kind.hasobject or kind != np.dtype(dtype) or kind.fields is not None:
        raise DamagedArrayError(f"it holds {kind}, not {dtype}")
    _check_shape(shape, fortran, dimensions)
    return shape


def _header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether the order is Fortran's, and type. Raises DamagedArrayError."""
    try:
        version = npy.read_magic(file)
        read: Any = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise DamagedArrayError(f"its version is {version}")
        shape, fortran, kind = read(file, max_header_size=LONGEST_HEADER)
    except HEADER_ERRORS as error:
        raise DamagedArrayError(f"its header cannot be understood ({type(error).__name__})") from error
    return tuple(shape), fortran, kind


def _check_shape(shape: tuple[int, ...], fortran: bool, dimensions: int) -> None:
    if fortran and len(shape) > 1:
        raise DamagedArrayError("its order is not C's")
    if len(shape) != dimensions or any(isinstance(size, bool) or size < 0 for size in shape):
        raise DamagedArrayError(f"its shape is {shape}")
