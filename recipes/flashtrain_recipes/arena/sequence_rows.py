"""Sequences of bytes from the rows of local tables and datasets, made once and kept on disk."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashtrain.data.sequences import Sequences
from flashtrain.data.text_files import TextReader
from flashtrain.errors import UserError
from flashtrain.files.caches import default_cache_dir, only_writer

log = logging.getLogger(__name__)

Row = Mapping[str, Any]
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)$")


def local_rows(path: Path) -> Iterator[tuple[Row, str]]:
    """The rows of a .jsonl or .parquet file, and where each stands in words. UserError: a file of another kind, or one
    that cannot be read."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"{path} is of no format that is read here: .jsonl or .parquet.")
    for where, row in TextReader().rows(path):
        yield row, where


def find_table(folder: Path, name: str) -> list[Path]:
    """A table's files in a folder, in the order of their names: NAME.jsonl, or its shards (NAME-00000-of-00002.jsonl,
    ...), all that begin with the name; where there is no .jsonl, .parquet. Empty: none. UserError: a shard that is not
    there."""
    for suffix in (".jsonl", ".parquet"):
        found = sorted(folder.glob(f"{name}*{suffix}"))
        if found:
            _check_shards(found)
            return found
    return []


def _check_shards(files: Sequence[Path]) -> None:
    """UserError where files say that they are some of so many, and not all of them are there."""
    numbers: dict[tuple[str, int], set[int]] = {}
    for path in files:
        shard = _SHARD.match(path.stem)
        if shard:
            numbers.setdefault((shard[1], int(shard[3])), set()).add(int(shard[2]))
    for (name, count), there in numbers.items():
        missing = sorted(set(range(count)) - there)
        if missing:
            held = f"{count - len(missing)} of the {count} files of {name}"
            raise UserError(f"{files[0].parent} has {held}; number {missing[0]} is missing.")


def hub_rows(name: str, split: str) -> Any:
    """A split of a dataset, rows by number. UserError: no `datasets`."""
    try:
        import datasets
    except ImportError as error:
        raise UserError("sequence.name=... needs `datasets`: pip install 'flashtrain[hub]'") from error
    return datasets.load_dataset(name, split=split)


def value_of(row: Row, names: Iterable[str], where: str) -> Any:
    """The first of these columns that the row has. UserError: it has none of them."""
    for name in names:
        if name in row:
            return row[name]
    raise UserError(f"{where}: no column {' or '.join(names)}. It has {', '.join(map(str, row))}.")


def fingerprint(paths: Iterable[Path]) -> str:
    """A short key of files by path, size and time."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        status = path.stat()
        digest.update(f"\n{path} {status.st_size} {status.st_mtime_ns}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


# Byte 0 stands in no text and is the padding; where it does stand in one, it becomes a space.
_SPACE = b" "


class ByteSequences:
    """Texts and labels while they are read; `finish` makes them Sequences. length: bytes kept of each text."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._bytes = bytearray()
        self._offsets = [0]
        self._labels: list[int] = []

    def add(self, label: int, *texts: str | bytes) -> None:
        """A sample of one or more texts."""
        for text in texts:
            encoded = text.encode("utf-8", "replace") if isinstance(text, str) else text
            self._bytes += encoded[: self.length].replace(b"\0", _SPACE)
            self._offsets.append(len(self._bytes))
        self._labels.append(label)

    def __len__(self) -> int:
        return len(self._labels)

    def finish(self) -> Sequences:
        """What was added."""
        tokens = np.frombuffer(bytes(self._bytes), dtype=np.uint8)
        return Sequences(tokens, np.array(self._offsets, dtype=np.int64), np.array(self._labels, dtype=np.uint8))


def held_out(count: int, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(kept, held out): numbers below count, `size` of them drawn to be held out, the same for equal seeds.

    UserError: none would be kept.
    """
    if count <= size:
        raise UserError(f"{count} training samples are too few to hold out sequence.validation={size}: choose fewer.")
    order = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, 7)))).permutation(count)
    return np.sort(order[size:]), np.sort(order[:size])


DTYPES = {"tokens": "uint8", "offsets": "int64", "labels": "uint8"}


def open_or_build(
    name: str,
    build: Callable[[], Sequences],
    cache_dir: str | os.PathLike[str] | None = None,
) -> Sequences:
    """The sequences in the cache folder `name`, memory-mapped; made by `build` where they are missing.

    name: of all that decides the content. Processes that ask at one time build once. UserError: a folder that cannot be
    written.
    """
    base = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    folder = base / name
    if not folder.is_dir():
        with only_writer(folder, "sequence.cache_dir"):
            if not folder.is_dir():
                _write(build(), folder)
    arrays = (folder / f"{field}.npy" for field in Sequences._fields)
    return Sequences(*(np.load(array, mmap_mode="r", allow_pickle=False) for array in arrays))


def _write(sequences: Sequences, folder: Path) -> None:
    unfinished = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        unfinished.mkdir()
        for field, values in sequences._asdict().items():
            np.save(unfinished / f"{field}.npy", values.astype(DTYPES[field], copy=False), allow_pickle=False)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
