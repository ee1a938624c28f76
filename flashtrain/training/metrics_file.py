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

from flashtrain.errors import UserError

STEP = "step"


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
            name in self._row and str(self._row[name]) != str(metrics[name]) for name in metrics if name != "epoch"
        )
        if self._row and (int(self._row[STEP]) != step or repeated):
            self._close_row()
        self._row = {**self._row, STEP: step, **metrics}

    @rank_zero_only
    def save(self) -> None:
        """Nothing yet: Lightning calls this after every metric, and a row is written when its step is over."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the last row."""
        self._close_row()

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
            self._rewrite(rows[:-1])
            self._row = {name: value for name, value in rows[-1].items() if value != ""}
            self.flush()

    @rank_zero_only
    def flush(self) -> None:
        """Have the row of the step in progress in the file: what a checkpoint of this step does not log again."""
        if not self._row:
            return
        self._add_columns()
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._columns, restval="").writerow(self._row)
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
            columns, rows = read_metrics(self.path)
            self._columns = columns
            kept = [row for row in rows if row.get(STEP, "").isdigit() and int(row[STEP]) < step]
            self._rewrite(kept)

    def _close_row(self) -> None:
        self.flush()
        self._row, self._row_at = {}, None

    def _add_columns(self) -> None:
        new = [name for name in self._row if name not in self._columns]
        if new:
            first = [STEP] if not self._columns else []
            self._columns = first + self._columns + [name for name in new if name not in first]
            rows = read_metrics(self.path)[1] if self.path.is_file() else []
            self._rewrite(rows if self._row_at is None else rows[:-1])
            self._row_at = None

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        partial = self.path.with_name(self.path.name + ".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("w", newline="") as file:
                writer = csv.DictWriter(file, self._columns, restval="", extrasaction="ignore")
                writer.writeheader()
                writer.writerows(rows)
            partial.replace(self.path)
        except OSError as problem:
            raise _unwritable(self.path, problem) from problem


def read_metrics(path: str | Path) -> tuple[list[str], list[dict[str, str]]]:
    """(columns, rows) of a metrics.csv, all values as text, "" where a row has none."""
    with Path(path).open(newline="") as file:
        reader = csv.DictReader(file, restval="")
        rows = [{name: value or "" for name, value in row.items() if name is not None} for row in reader]
        return list(reader.fieldnames or []), rows


def _unwritable(path: Path, problem: OSError) -> UserError:
    return UserError(f"could not write {path}: {problem.strerror or problem}")
