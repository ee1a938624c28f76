"""Write and read metrics.jsonl: all numbers that a run logged, one JSON object per step,
across kills and resumes."""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_only

from flashtrain.announce import say

METRICS = "metrics.jsonl"
STEP, EPOCH = "step", "epoch"


class MetricsFile(Logger):
    """A Lightning logger that appends each step's metrics to a file, as one line of JSON.

    Steps count from 0, as in Lightning's loggers. A run that resumes from an earlier step removes
    the lines from that step on, because it logs them again. (Lightning's own CSVLogger, 2.6.6,
    starts a new file when a run resumes, and loses the earlier rows.)
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self._row: dict[str, Any] = {}
        self._row_at = 0  # where its line begins in the file, in bytes
        self._begun = False

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: config.yaml in the run folder has the hyperparameters."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        step = 0 if step is None else int(step)
        self.continue_from(step)
        # Repeated values start no new row: the learning rate is logged with every
        # micro-batch of a step.
        changed = any(
            str(self._row.get(name, value)) != str(value)
            for name, value in metrics.items()
            if name != EPOCH
        )
        if self._row and (self._row[STEP] != step or changed):
            self.flush()
            self._row, self._row_at = {}, self.path.stat().st_size
        # The row keeps its first epoch: the validation after the last step comes
        # when the epoch is over.
        epoch = {EPOCH: self._row[EPOCH]} if EPOCH in self._row else {}
        self._row = {**self._row, STEP: step, **metrics, **epoch}

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the last line, to which a validation after the fit may still add values."""
        self.flush()

    @rank_zero_only
    def continue_from(self, done: int, every: int | None = None) -> None:
        """Remove the lines after the first `done` optimizer steps; values may still be added to the
        last remaining line.

        Print a warning if lines are damaged, or if rows are missing though the run logs one in
        `every` steps.
        """
        if self._begun:
            return
        self._begun = True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            file.seek(0)
            size, last, damaged = 0, -1, 0
            for begins, ends, row in _whole_lines(file):
                if row.get(STEP, last) >= done:
                    break
                if row.get(STEP) == done - 1:
                    self._row, self._row_at = row, begins
                size, last, damaged = ends, row.get(STEP, last), damaged + (not row)
            file.truncate(size)
        if damaged or (every is not None and done - 1 - last >= every):
            lost = f"no rows of steps {last + 1} to {done - 1}"
            if damaged:
                lost = f"{damaged} damaged lines"
            say(f"{self.path} has {lost}: its curves have a gap there.", level=logging.WARNING)
        if not self._row:
            self._row_at = size

    @rank_zero_only
    def flush(self) -> None:
        """Write the line of the current step to the file; later values of this step rewrite the
        line."""
        if not self._row:
            return
        with self.path.open("r+b") as file:
            file.seek(self._row_at)
            file.write((json.dumps(self._row, default=float) + "\n").encode())
            file.truncate()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, one dictionary per step. Damaged and
    incomplete lines are skipped."""
    with Path(path).open("rb") as file:
        return [row for _, _, row in _whole_lines(file) if row]


def _whole_lines(file: BinaryIO) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (first byte, byte after the last, row) of each complete line; the row of a damaged line
    is {}."""
    begins = 0
    for line in file:
        if not line.endswith(b"\n"):
            return
        ends = begins + len(line)
        try:
            row = json.loads(line)
        except ValueError:
            row = {}
        yield begins, ends, row if isinstance(row, dict) and isinstance(row.get(STEP), int) else {}
        begins = ends
