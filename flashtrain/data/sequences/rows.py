"""Rows of a local table or of a dataset that `datasets` loads: what the tasks that are not generated are read from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError

Row = Mapping[str, Any]
_AT_ONCE = 512


def local_rows(path: Path) -> Iterator[Row]:
    """The rows of a .jsonl or .parquet file. UserError: a file of another kind, or one that cannot be read."""
    if path.suffix == ".jsonl":
        yield from _json_rows(path)
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path)
    else:
        raise UserError(f"{path} is of no format that is read here: .jsonl or .parquet.")


def find_table(folder: Path, names: Iterable[str]) -> Path | None:
    """The first of NAME.jsonl and NAME.parquet in a folder, also with more after the name (train-00000-of-00001)."""
    for name in names:
        for suffix in (".jsonl", ".parquet"):
            found = sorted(folder.glob(f"{name}*{suffix}"))
            if found:
                return found[0]
    return None


def hub_rows(name: str, split: str) -> Any:
    """A split of a dataset, rows by number. UserError: no `datasets`, or it cannot load it."""
    try:
        import datasets
    except ImportError as error:
        raise UserError("sequence.name=... needs `datasets`: pip install 'flashtrain[hub]'") from error
    try:
        return datasets.load_dataset(name, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"cannot load the dataset {name}, split {split}: {_one_line(error)}. Check its name, and that this machine "
            "reaches the hub; sequence.path=... reads local files."
        ) from error


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


def _json_rows(path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                row = json.loads(line) if line.strip() else None
                if row is not None and not isinstance(row, dict):
                    raise UserError(f"{path}:{number}: not a JSON object on a line.")
                if row is not None:
                    yield row
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {_one_line(error)}.") from error


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow  # here, since it is slow to import
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=_AT_ONCE):
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read as parquet: {_one_line(error)}.") from error


def _one_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
