"""metrics.csv: a run's metrics as one table, which a resumed run continues.

Lightning's CSVLogger deletes the file of the run that it resumes, and writes into version_N folders.
"""

from __future__ import annotations

import csv
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only

from flashtrain.announce import say
from flashtrain.errors import UserError
from flashtrain.files.disk import csv_value
from flashtrain.files.foreign_files import MIB, read_text

STEP, EPOCH = "step", "epoch"
MOST_BYTES = 512 * MIB  # a million rows of a run are some 200
_LARGEST_STEP = 18  # digits


class MetricsFile(Logger):
    """A Lightning logger that writes every metric to one CSV file: a column a metric, a row a step.

    What is logged for one step in one go shares a row. The file is appended to; a new metric adds its column. A run
    that continues from an earlier step drops the rows from that step on, since it logs them again. Steps are counted
    as Lightning's loggers have them, from 0. `flush` puts a row on the disk that may still gain values.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self._columns: list[str] = []
        self._row: dict[str, Any] = {}
        self._row_at: int | None = None  # where the row stands in the file, once flushed
        self._begun = False

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @property
    def log_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run folder's config.yaml has them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        step = 0 if step is None else int(step)
        self._begin(step)
        # The same again is no other row: the learning rate comes with every micro-batch of a step.
        repeated = any(
            name in self._row and str(self._row[name]) != str(metrics[name]) for name in metrics if name != EPOCH
        )
        if self._row and (int(self._row[STEP]) != step or repeated):
            self._close_row()
        # The epoch is that of the row's step: the validation after the last one comes when the epoch is over.
        epoch = {EPOCH: self._row[EPOCH]} if EPOCH in self._row else {}
        self._row = {**self._row, STEP: step, **metrics, **epoch}

    @rank_zero_only
    def save(self) -> None:
        """Nothing yet: Lightning calls this after every metric, and a row is written when its step is over."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the last row, which a validation that follows the fit may still add to."""
        self.flush()

    @rank_zero_only
    def continue_from(self, done: int) -> None:
        """A run goes on after so many optimiser steps: the rows of those stay, and the last of them may gain values."""
        if self._begun:
            return
        self._begin(done)
        if not self.path.is_file() or not done:
            return
        _, rows = read_metrics(self.path)
        if rows and int(rows[-1][STEP]) == done - 1:
            self._row = {name: value for name, value in rows[-1].items() if value != ""}
            self._row_at = self._rewrite(rows)

    @rank_zero_only
    def flush(self) -> None:
        """Have the row of the step in progress in the file: what a checkpoint of this step does not log again."""
        if not self._row:
            return
        new = [name for name in self._row if name not in self._columns]
        if new:
            # In one go with the row: a run killed in between would have lost a row that its checkpoint has behind it.
            rows = read_metrics(self.path)[1] if self.path.is_file() else []
            earlier = rows if self._row_at is None else rows[:-1]
            self._columns = list(dict.fromkeys([*(self._columns or [STEP]), *new]))
            self._row_at = self._rewrite([*earlier, self._row])
            return
        text = io.StringIO(newline="")
        values = {name: csv_value(value) for name, value in self._row.items()}
        csv.DictWriter(text, self._columns, restval="").writerow(values)
        try:
            with self.path.open("r+b" if self.path.exists() else "wb") as file:
                self._row_at = file.seek(0, 2) if self._row_at is None else file.seek(self._row_at)
                file.write(text.getvalue().encode())
                file.truncate()
        except OSError as problem:
            raise _unwritable(self.path, problem) from problem

    def _begin(self, step: int) -> None:
        """Before the first row: keep what an earlier run wrote before this step."""
        if self._begun:
            return
        self._begun = True
        if self.path.is_file():
            try:
                columns, rows = read_metrics(self.path)
            except UserError as error:
                self._set_aside(error)
                return
            self._columns = columns
            self._rewrite([row for row in rows if (at := _step_of(row)) is not None and at < step])

    def _set_aside(self, error: UserError) -> None:
        """Keep a file that is no metrics.csv under another name: the run goes on with a new one."""
        kept = self.path.with_name(f"{self.path.name}.unreadable")
        try:
            self.path.replace(kept)
        except OSError as problem:
            raise _unwritable(self.path, problem) from problem
        say(f"{error} It is kept as {kept}, and a new one begins.")

    def _close_row(self) -> None:
        self.flush()
        self._row, self._row_at = {}, None

    def _rewrite(self, rows: list[dict[str, Any]]) -> int:
        """Have these rows alone in the file; returns where the last of them begins, in bytes."""
        partial = self.path.with_name(self.path.name + ".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, self._columns, restval="", extrasaction="ignore")
                writer.writerow({name: csv_value(name) for name in self._columns})
                table = [{name: csv_value(value) for name, value in row.items()} for row in rows]
                writer.writerows(table[:-1])
                last = file.tell()
                writer.writerows(table[-1:])
            partial.replace(self.path)
        except OSError as problem:
            raise _unwritable(self.path, problem) from problem
        return last


def read_metrics(path: str | Path) -> tuple[list[str], list[dict[str, str]]]:
    """(columns, rows) of a metrics.csv, all values as text, "" where a row has none.

    Raises UserError for a file that is none: no text, a field of more than 131,072 characters, no column of steps.
    """
    reader = csv.DictReader(io.StringIO(read_text(path, MOST_BYTES), newline=""), restval="")
    try:
        rows = [{name: value or "" for name, value in row.items() if name is not None} for row in reader]
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num + 1}, is no line of a metrics.csv: {error}.") from error
    columns = list(reader.fieldnames or [])
    if columns and (STEP not in columns or len(set(columns)) < len(columns)):
        raise UserError(f"{path} is no metrics.csv: its first line must name each metric once, and {STEP}.")
    return columns, rows


def _step_of(row: dict[str, str]) -> int | None:
    """The step of a row; None where it is no number."""
    text = row.get(STEP, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _LARGEST_STEP else None


def _unwritable(path: Path, problem: OSError) -> UserError:
    return UserError(f"could not write {path}: {problem.strerror or problem}")
