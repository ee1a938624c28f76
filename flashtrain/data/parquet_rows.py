"""The rows of a .parquet file, read in pieces by pyarrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow

ROWS = 256  # at once


def parquet_rows(
    path: Path, columns: Callable[[pyarrow.Schema], Sequence[str]] | None = None
) -> Iterator[dict[str, Any]]:
    """Each row's values of the columns that `columns` names, given the file's schema (None: of all)."""
    import pyarrow.parquet  # slow to import, and most sources need none of it

    source = path if isinstance(path, Path) else path.open("rb")  # a path, or what stands for one of an address
    with pyarrow.parquet.ParquetFile(source) as table:
        names = None if columns is None else list(columns(table.schema_arrow))
        for batch in table.iter_batches(batch_size=ROWS, columns=names):
            yield from batch.to_pylist()
