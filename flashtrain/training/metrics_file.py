"""metrics.jsonl: every number that a run logged, a JSON object a step, through kills and resumes."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_only

METRICS = "metrics.jsonl"
STEP, EPOCH = "step", "epoch"


class MetricsFile(Logger):
    """A Lightning logger that appends what is logged for a step to a file, as one line of JSON.

    Steps are counted as Lightning's loggers have them, from 0. A run that continues from an earlier step cuts the lines
    from that step on, since it logs them again. `flush` writes the line of a step that may still gain values.
    Lightning's own CSVLogger (2.6.6) begins a new file where a run is resumed: its rows before are lost.
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

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run folder's config.yaml has them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        step = 0 if step is None else int(step)
        self.continue_from(step)
        # The same again is no other row: the learning rate comes with every micro-batch of a step.
        changed = any(str(self._row.get(name, value)) != str(value) for name, value in metrics.items() if name != EPOCH)
        if self._row and (self._row[STEP] != step or changed):
            self.flush()
            self._row, self._row_at = {}, self.path.stat().st_size
        # The epoch is that of the row's step: the validation after the last one comes when the epoch is over.
        epoch = {EPOCH: self._row[EPOCH]} if EPOCH in self._row else {}
        self._row = {**self._row, STEP: step, **metrics, **epoch}

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the last line, which a validation that follows the fit may still add to."""
        self.flush()

    @rank_zero_only
    def continue_from(self, done: int) -> None:
        """A run goes on after so many optimiser steps: the lines of those stay, the last of them may gain values."""
        if self._begun:
            return
        self._begun = True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            file.seek(0)
            kept = 0
            for begins, ends, row in _whole_lines(file):
                if row[STEP] >= done:
                    break
                if row[STEP] == done - 1:
                    self._row, self._row_at = row, begins
                kept = ends
            file.truncate(kept)
        if not self._row:
            self._row_at = kept

    @rank_zero_only
    def flush(self) -> None:
        """Have the line of the step in progress in the file: what a checkpoint of this step does not log again."""
        if not self._row:
            return
        with self.path.open("r+b") as file:
            file.seek(self._row_at)
            file.write((json.dumps(self._row, default=float) + "\n").encode())
            file.truncate()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, a dictionary a step: what was logged, by name. A last line that a kill cut short is
    passed over."""
    with Path(path).open("rb") as file:
        return [row for _, _, row in _whole_lines(file)]


def _whole_lines(file: BinaryIO) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(first byte, byte after the last, row) of each line that has its end."""
    begins = 0
    for line in file:
        if not line.endswith(b"\n"):
            return
        ends = begins + len(line)
        yield begins, ends, json.loads(line)
        begins = ends
