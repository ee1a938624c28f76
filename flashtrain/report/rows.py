"""Read and write result files and summary rows, from which all tables and figures are drawn."""

from __future__ import annotations

import datetime
import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.files.disk import write_atomically
from flashtrain.folders.run_folder import FINISHED, OUT_OF_MEMORY, SUMMARY_FILE, read_summary
from flashtrain.training import hardware as machine

Row = dict[str, Any]  # flat: a run's summary.json, or one line of a measured table
Rows = Sequence[Mapping[str, Any]]  # to read

# The result file that a benchmark run writes.
RESULT = "result.json"
_OLDER = {"context_way": "context_method"}  # columns of older rows, and their present names

# The statuses of successful rows: measured rows have none, tables show "ok".
_SUCCESSES = (None, "", "ok", FINISHED)

# Folders inside a sweep's folder that are not its runs.
_NOT_RUNS = ("wandb", "checkpoints", "cache", "__pycache__")


@dataclass(frozen=True)
class ResultFile:
    """The contents of one recipes/results/NAME.json."""

    recipe: str
    command: str  # that reproduces the rows
    date: str  # the day of measuring, ISO 8601
    device: str
    versions: dict[str, str]  # of each package, and of python and cuda
    rows: list[Row]  # flat dictionaries; a value is a string, a number, a bool or None (missing)


def read_result(path: str | Path) -> ResultFile:
    """Read a result file. Raises UserError for a file of another kind."""
    try:
        found = ResultFile(**json.loads(Path(path).read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} is not a result file, as --save writes: {error}") from error
    return replace(found, rows=[_present(row) for row in found.rows])


def command_line(words: Iterable[str], *, without: tuple[str, ...] = ()) -> str:
    """Return the flashtrain command with these settings, quoted for a shell.

    Args:
        words: the settings, such as "context=1024".
        without: beginnings; a setting that begins with one of them is left out.
    """
    shown = [word for word in words if not word.lstrip("+~").startswith(without)]
    return " ".join(["python -m flashtrain", *map(shlex.quote, shown)])


def write_result(
    path: str | Path,
    recipe: str,
    command: str,
    rows: Sequence[Mapping[str, Any]],
    device: str | None = None,
    versions: Mapping[str, str] | None = None,
    date: str | None = None,
) -> ResultFile:
    """Write a result file atomically, and return its contents.

    Args:
        path: the file to write.
        recipe, command: name of the recipe, and the command that reproduces the rows.
        rows: flat dictionaries; floats that are not finite are written as null (JSON has none).
        device, versions: where the rows were measured; None: this machine's.
        date: the day of measuring, ISO 8601; None: today.
    """
    result = ResultFile(
        recipe=recipe,
        command=command,
        date=datetime.date.today().isoformat() if date is None else date,
        device=machine.device_name() if device is None else device,
        versions=machine.versions() if versions is None else dict(versions),
        rows=[{key: _finite(value) for key, value in row.items()} for row in rows],
    )
    write_atomically(
        path, json.dumps(asdict(result), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    )
    return result


def collect_summaries(folder: str | Path) -> list[Row]:
    """Return the summary row of every run below `folder`, in the order of job numbers, or of
    `folder` if it is a run.

    A row gains the key "run", its folder's path relative to `folder`. A job that ended before
    it wrote its summary.json has the status "no summary". Raises UserError if no run is in
    the folder or below it.
    """
    folder = Path(folder)
    own = own_row(folder)
    rows = _rows_below(folder) if own is None else [own]
    if not rows:
        raise UserError(
            f"no run with a {SUMMARY_FILE} in or below '{folder}'. "
            "Give the folder of a run or sweep."
        )
    return rows


def own_row(folder: Path) -> Row | None:
    """Return the summary row of a run folder; None if the folder is not one."""
    return _summary_row(folder, folder.name) if _is_run(folder) else None


def trainings_of(folder: Path) -> list[Row]:
    """Return the summary rows of the runs inside a run's folder, such as a study's;
    other folders are ignored."""
    return [row for row in _rows_below(folder) if _is_run(folder / str(row["run"]))]


def _rows_below(folder: Path) -> list[Row]:
    return [_summary_row(run, run.relative_to(folder).as_posix()) for run in _run_folders(folder)]


def has_failed(row: Mapping[str, Any]) -> bool:
    """Return whether a row reports a failure: a status other than success, or an error text."""
    # A number under "error" is a measurement, the distance from a reference.
    status, error = row.get("status"), row.get("error")
    return (isinstance(error, str) and bool(error)) or status not in _SUCCESSES


def status_text(row: Mapping[str, Any]) -> str:
    """Return a row's status in words: "ok", "failed", "out of memory", "no summary" and others."""
    if not has_failed(row):
        return "ok"
    status = row.get("status")
    status = "failed" if status in _SUCCESSES else str(status)
    text = f"{status} {row.get('error') or ''}".lower().replace("outofmemory", OUT_OF_MEMORY)
    return OUT_OF_MEMORY if OUT_OF_MEMORY in text else status


def values_of(rows: Iterable[Mapping[str, Any]], key: str) -> list[Any]:
    """Return the distinct values of a key in the rows, in their order of
    appearance, without None."""
    different: list[Any] = []
    for row in rows:
        value = row.get(key)
        if value is not None and value not in different:
            different.append(value)
    return different


def _run_folders(folder: Path) -> Iterator[Path]:
    for child in sorted(
        (entry for entry in folder.iterdir() if entry.is_dir()), key=_in_number_order
    ):
        if child.name.startswith(".") or child.name in _NOT_RUNS:
            continue
        if not _is_run(child) and any(child.glob(f"*/**/{SUMMARY_FILE}")):
            yield from _run_folders(child)
        else:
            yield child


def _is_run(folder: Path) -> bool:
    return (folder / SUMMARY_FILE).is_file()


def _in_number_order(path: Path) -> list[tuple[int, int, str]]:
    # 2 before 10, and numbers before words
    parts = re.split(r"(\d+)", path.name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part]


def _summary_row(folder: Path, name: str) -> Row:
    missing = {"status": "no summary", "error": "the job ended without writing summary.json"}
    return {"run": name, **_present(read_summary(folder) or missing)}


def _present(row: Row) -> Row:
    return {_OLDER.get(name, name): value for name, value in row.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
