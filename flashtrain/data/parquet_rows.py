"""The rows of a .parquet file, read in pieces; whatever is wrong with it is one UserError."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtrain.data.json_lines import one_line
from flashtrain.errors import UserError
from flashtrain.files.compressed import DEFAULT_LONGEST, UnpackedSize, too_long

if TYPE_CHECKING:
    import pyarrow

ROWS = 256
BATCH_BYTES = 2**26  # of text at once, by what the file says of its texts' mean length


def parquet_rows(
    path: Path,
    columns: Callable[[pyarrow.Schema], Sequence[str]],
    *,
    longest: int = DEFAULT_LONGEST,
    setting: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Each row's values of the columns that `columns` names, from the file's schema; texts, numbers and nulls only.

    longest: bytes of one text; setting: its name, where it has one.
    UserError: no parquet, a damaged one, a column that holds something else, a longer text, far more text than file.
    """
    import pyarrow  # here, since it is slow to import and most sources need none of it
    import pyarrow.parquet

    # pyarrow believes what a file says of itself: any of these comes of one that says something odd.
    errors = (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError)
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            names = list(columns(table.schema_arrow))
            for name in names:
                _check_plain(path, name, table.schema_arrow.field(name).type)
            texts = [name for name in names if _is_text(table.schema_arrow.field(name).type)]
            rows, shared = _plan(path, table.metadata, texts, longest, setting)
        # A long text that many rows share stays one text in memory: as a number in a dictionary, as the file has it.
        with pyarrow.parquet.ParquetFile(path, read_dictionary=shared) as table:
            size = UnpackedSize(path)
            for batch in table.iter_batches(batch_size=rows, columns=names):
                columns_of = [_values(path, batch.column(name), longest, setting, size) for name in names]
                for values in zip(*columns_of, strict=True):
                    yield dict(zip(names, values, strict=True))
    except UserError:
        raise
    except errors as error:
        raise UserError(f"cannot read {path} as parquet: {one_line(error)}.") from error


def is_plain(kind: pyarrow.DataType) -> bool:
    """Whether a column of this type holds texts, numbers, true and false."""
    import pyarrow

    types = pyarrow.types
    return _is_text(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def _is_text(kind: pyarrow.DataType) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind))


def _check_plain(path: Path, name: str, kind: pyarrow.DataType) -> None:
    if not is_plain(kind):
        raise UserError(f"{path}: column '{name}' holds {kind}, not text.")


def _plan(
    path: Path, metadata: pyarrow.parquet.FileMetaData, texts: Sequence[str], longest: int, setting: str | None
) -> tuple[int, list[str]]:
    """Rows of a batch, fewer where the texts are long; and which texts are read as numbers in a dictionary."""
    rows, shared = ROWS, set(texts)
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            name = column.path_in_schema
            if name not in texts or not column.num_values:
                continue
            mean = column.total_uncompressed_size // column.num_values
            if mean > longest:
                raise too_long(str(path), longest, setting)
            rows = min(rows, max(1, BATCH_BYTES // max(1, mean)))
            if "DELTA_BYTE_ARRAY" in column.encodings:
                rows = 1  # a few bytes may stand for a long text: the one before, and some more
            if any(encoding.startswith("DELTA") for encoding in column.encodings):
                shared.discard(name)  # pyarrow cannot
    return rows, sorted(shared)


def _values(path: Path, column: pyarrow.Array, longest: int, setting: str | None, size: UnpackedSize) -> Iterator[Any]:
    import pyarrow

    if not isinstance(column, pyarrow.DictionaryArray) and not _is_text(column.type):
        yield from column.to_pylist()
        return
    texts, places = column, iter(range(len(column)))
    if isinstance(column, pyarrow.DictionaryArray):
        texts, places = column.dictionary, iter(column.indices.to_pylist())
    for place in places:
        text = None if place is None else texts[place]
        if text is None or not text.is_valid:
            yield None
            continue
        if text.as_buffer().size > longest:
            raise too_long(str(path), longest, setting)
        size.add(text.as_buffer().size)
        yield text.as_py()
