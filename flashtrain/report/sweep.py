"""Report a sweep when it ends, or later: one table and one figure of all its jobs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashtrain.files.disk import write_atomically
from flashtrain.report.figures import sweep_figure
from flashtrain.report.formats import heading
from flashtrain.report.rows import Row, collect_summaries, has_failed, values_of
from flashtrain.report.table import Table, constants, make_table, markdown_text

# Keys that identify a run: a column of the table if they differ, otherwise part of the caption.
_IDENTITY = ("recipe", "implementation", "model", "attention", "context", "batch")
# Jobs are ranked by the first of these that any of them has; True: the largest first.
_SCORES = {
    "micro_f1": True,
    "accuracy": True,
    "validation_accuracy": True,
    "validation_loss": False,
    "train_loss": False,
    "tokens_per_second": True,
}
_MEASURES = ("mfu", "peak_memory_gib", "seconds")  # further ones
_COUNTS = ("steps", "held_out_samples")  # columns only if they differ, after the measures
_WIDTH = 120  # characters of a table
# Keys that follow from another setting, or always differ.
_NO_LINE_OF_ITS_OWN = ("batch", "run")
_NOT_SETTINGS = ("hydra.", "logger.", "output", "resume")


def report_sweep(folder: str | Path) -> None:
    """Print the table of a sweep's jobs and write sweep.md and sweep.png into its folder.

    Columns are the scores, then the settings that differ among the jobs (context, model, ..., and
    every override with several values), then other measures. The best job comes first; failed jobs
    come last, with their errors.

    Raises:
        UserError: no run is in the folder or below it.
    """
    folder = Path(folder)
    rows = with_overrides(collect_summaries(folder))
    varied = varied_keys(rows)
    table = sweep_table(rows, varied)
    table.print()
    write_atomically(folder / "sweep.md", f"{markdown_text(table.title)}\n\n{table.markdown()}")
    x = _figure_axis(rows, varied)
    if x and any(values_of(rows, measure) for measure in (*_SCORES, *_MEASURES)):
        group = [key for key in varied if key != x and key not in _NO_LINE_OF_ITS_OWN]
        sweep_figure(rows, folder / "sweep.png", x, group)


def sweep_table(rows: Sequence[Row], varied: Sequence[str] | None = None) -> Table:
    """Make the table of a sweep or of other runs, the best first: its columns are their names and
    scores, then the `varied` settings (None: all that differ) and further measures, as far as it is
    120 characters wide. The title has the settings that are equal and what is left out."""
    varied = varied_keys(rows) if varied is None else varied
    measures = [key for key in _MEASURES if values_of(rows, key)]
    measures += [key for key in _COUNTS if len(values_of(rows, key)) > 1]
    same = constants(rows, [key for key in (*_IDENTITY, *_COUNTS, "device") if key not in varied])
    columns = ["run", *(key for key in _SCORES if values_of(rows, key))]
    if len(columns) > 1:
        rows = ranked(rows, columns[1])
        same.append(f"the best {heading(columns[1])} first")
        if "data.tokenizer" in varied:
            same.append(
                "losses of different tokenizers do not compare, mode=evaluate's bits a byte do"
            )
    left: list[str] = []
    for key in dict.fromkeys((*varied, *measures)):
        fits = make_table(rows, [*columns, key]).width <= _WIDTH
        (columns if fits else left).append(key)
    same += [f"left out for want of room (see --columns): {' '.join(left)}"] if left else []
    return make_table(rows, columns, title=", ".join(same))


def ranked(rows: Sequence[Row], score: str) -> list[Row]:
    """Sort rows by the key `score`, the best first; failed rows and rows without a score come
    last."""

    def place(row: Row) -> tuple[bool, float]:
        value = row.get(score)
        if has_failed(row) or value is None or math.isnan(value):
            return True, 0.0
        return False, -value if _SCORES[score] else value

    return sorted(rows, key=place)


def with_overrides(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the rows with their command-line settings as additional keys; a row's own
    values take precedence."""
    return [
        {**override_values(row), **{k: v for k, v in row.items() if v is not None}} for row in rows
    ]


def varied_keys(rows: Sequence[Row]) -> list[str]:
    """Return the keys that differ among the jobs: recipe, model and the like
    first, then other overrides."""
    varied = [key for key in _IDENTITY if len(values_of(rows, key)) > 1]
    others = dict.fromkeys(
        key for row in rows for key in override_values(row) if key not in _IDENTITY
    )
    return varied + [key for key in others if any(row.get(key) != rows[0].get(key) for row in rows)]


def override_values(row: Mapping[str, Any]) -> Row:
    """Return a row's overrides (command-line settings) by key, with numbers
    and booleans as such."""
    return {key.lstrip("+~"): _typed(text) for key, text in override_texts(row).items()}


def override_texts(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row's overrides (command-line settings) by key, as texts."""
    pairs = [word.partition("=") for word in row.get("overrides", "").split()]
    # without settings of where a job writes
    return {
        key: text
        for key, sign, text in pairs
        if sign and not key.lstrip("+~").startswith(_NOT_SETTINGS)
    }


def _typed(text: str) -> Any:
    """Return the value that a setting's text stands for: 3 for "3", 0.1 for "0.1", True for "true";
    any other text unchanged."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (int, float)) else text


def _figure_axis(rows: Sequence[Row], varied: Sequence[str]) -> str | None:
    """Return the key for the x axis: the context if it differs, else the first number that differs,
    else any key that differs; None if nothing can be drawn."""
    if "context" in varied:
        return "context"
    own = [key for key in varied if key not in _NO_LINE_OF_ITS_OWN]
    numeric = [
        key for key in own if all(isinstance(value, (int, float)) for value in values_of(rows, key))
    ]
    fallback = ["context"] if values_of(rows, "context") else []
    return next(iter([*numeric, *own, *fallback]), None)
