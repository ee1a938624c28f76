"""Sequences from rows of files, and kept on disk once they were made.

Rows of a local table or of a dataset that `datasets` loads: what the tasks that are not generated are read from.
Texts become sequences of bytes, gathered one after another. A folder of sequences appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import numpy as np

from flashtrain.data.labelled_documents import jsonl_objects
from flashtrain.data.sequences import Sequences, SequenceShape
from flashtrain.data.text_files import is_plain, one_line, parquet_rows
from flashtrain.errors import UserError
from flashtrain.files.addresses import work_offline_where_unreachable
from flashtrain.files.caches import default_cache_dir
from flashtrain.files.npy_files import DamagedArrayError, map_npy

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger(__name__)

Row = Mapping[str, Any]
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)$")


def local_rows(path: Path) -> Iterator[tuple[Row, str]]:
    """The rows of a .jsonl or .parquet file, and where each stands in words. UserError: a file of another kind, or one
    that cannot be read."""
    if path.suffix == ".jsonl":
        yield from jsonl_objects(path)
    elif path.suffix == ".parquet":
        for number, row in enumerate(parquet_rows(path, _plain_columns), start=1):
            yield row, f"{path}, row {number}"
    else:
        raise UserError(f"{path} is of no format that is read here: .jsonl or .parquet.")


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
    """A split of a dataset, rows by number. UserError: no `datasets`, or it cannot load it."""
    work_offline_where_unreachable()
    try:
        import datasets
    except ImportError as error:
        raise UserError("sequence.name=... needs `datasets`: pip install 'flashtrain[hub]'") from error
    try:
        return datasets.load_dataset(name, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"cannot load the dataset {name}, split {split}: {one_line(error)}. Check its name, and that this machine "
            "reaches the hub; sequence.path=... reads local files."
        ) from error


def value_of(row: Row, names: Iterable[str], where: str) -> Any:
    """The first of these columns that the row has. UserError: it has none of them."""
    for name in names:
        if name in row:
            return row[name]
    raise UserError(f"{where}: no column {' or '.join(names)}. It has {', '.join(map(str, row))}.")


def _plain_columns(schema: pyarrow.Schema) -> list[str]:
    return [field.name for field in schema if is_plain(field.type)]


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
    shape: SequenceShape | None = None,
) -> Sequences:
    """The sequences in the cache folder `name`, memory-mapped; made by `build` where they are missing.

    name: of all that decides the content. shape: what a model is told of them, which holds for what is read too.
    Processes that ask at one time build once. UserError: a folder that cannot be written, or is damaged.
    """
    base = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    folder = base / name
    if not folder.is_dir():
        try:
            base.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(f"{folder}.lock"):
                if not folder.is_dir():
                    _write(build(), folder)
        except OSError as error:
            raise UserError(
                f"cannot write to the cache folder {base}: {error.strerror or error}. "
                "Choose another with sequence.cache_dir, or set FLASHTRAIN_CACHE."
            ) from error
    try:
        found = Sequences(*(map_npy(folder / f"{field}.npy", DTYPES[field]) for field in Sequences._fields))
        _check(found, shape)
    except DamagedArrayError as error:
        raise UserError(f"{folder} is damaged ({error}): delete it, and it is made anew.") from error
    return found


def _check(found: Sequences, shape: SequenceShape | None) -> None:
    """Raise DamagedArrayError where offsets, tokens and labels do not fit one another, or the shape."""
    tokens, offsets, labels = found
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(tokens) or (offsets[1:] < offsets[:-1]).any():
        raise DamagedArrayError("offsets.npy does not fit tokens.npy")
    towers, rest = divmod(len(offsets) - 1, max(1, len(labels)))
    if rest or (towers < 1 and len(labels)) or (shape is not None and len(labels) and towers != shape.towers):
        raise DamagedArrayError("offsets.npy does not fit labels.npy")
    if shape is not None and labels.max(initial=0) >= shape.classes:
        raise DamagedArrayError(f"labels.npy holds {labels.max()}, of {shape.classes} classes")
    if shape is not None and tokens.max(initial=0) >= shape.vocab_size:
        raise DamagedArrayError(f"tokens.npy holds {tokens.max()}, of {shape.vocab_size} tokens")


def _write(sequences: Sequences, folder: Path) -> None:
    unfinished = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        unfinished.mkdir()
        for field, values in sequences._asdict().items():
            np.save(unfinished / f"{field}.npy", values.astype(DTYPES[field], copy=False), allow_pickle=False)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
