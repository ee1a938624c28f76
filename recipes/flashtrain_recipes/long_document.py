"""recipe=long-document: fine-tune BERT at each context on the same number of texts;
the table and the figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.folders.run_folder import FINISHED, read_summary
from flashtrain.report.figures import line_figure
from flashtrain.report.rows import Row, values_of
from flashtrain.report.table import make_table
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.settings import Settings
from flashtrain.tasks.fine_tuning.prepare import check_fine_tuning_step
from flashtrain.tasks.fine_tuning.splits import check_trainable, read_rows
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.context_study import ContextStudy, run_of, trained_contexts

FIGURE = "score.png"
BOUND = "best possible with so many tokens"
# Columns of the comparison's table.
_TABLE = (
    "context", "micro_f1", "accuracy", "best_micro_f1", "validation_loss", "samples", "batch",
    "micro_batch",
    "tokens_per_second", "mfu", "peak_memory_gib", "seconds", "status",
)  # fmt: skip
# true of the whole result.
_DROPPED = ("device", "versions", "overrides", "date", "recipe", "devices")


class DocumentsStudy(ContextStudy):
    """The comparison of contexts for BERT fine-tuned to classify documents."""

    def __init__(self, settings: Settings, hardware: Hardware, overrides: CommandLine) -> None:
        super().__init__(settings, hardware, overrides)
        for context in settings.lengths.contexts or []:
            check_fine_tuning_step(settings.having(context=context))
        if settings.finetune.data != "synthetic":
            check_trainable(read_rows(settings.finetune), settings.finetune)

    def rows(self, folder: Path) -> list[Row]:
        rows = []
        for context in trained_contexts(folder):
            summary = read_summary(run_of(folder, context))
            row: dict[str, Any] = {
                key: value for key, value in summary.items() if key not in _DROPPED
            }
            if row.get("status") == FINISHED:
                del row["status"]
            rows.append({"implementation": "flashtrain", **row, "context": context})
        return rows

    def show(self, rows: list[Row], folder: Path) -> list[Path]:
        columns = [key for key in _TABLE if values_of(rows, key)]
        make_table(rows, columns, "score on test texts by context, at equal samples").print()
        return [documents_figure(rows, folder / FIGURE)] if _scored(rows) else []

    def best(self, rows: Sequence[Row]) -> dict[str, Any]:
        scored = _scored(rows)
        if not scored:
            return {}
        best = max(scored, key=_score)
        return {
            "best_context": best["context"],
            "score": _score(best),
            "contexts_scored": len(scored),
        }


def documents_figure(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Draw the test score (micro-F1, or accuracy) against context as a PNG, with the upper
    bound where it is known.

    Raises:
        UserError: the rows have no score by context, being of another recipe.
    """
    measure = next((key for key in ("micro_f1", "accuracy") if values_of(rows, key)), None)
    if measure is None or not values_of(rows, "context"):
        raise UserError(
            "no row has a score by context: "
            "draw this figure from the result.json of recipe=long-document."
        )
    drawn: list[Row] = [
        {**row, "series": f"flashtrain, {row.get('model', 'BERT')}"} for row in rows
    ]
    drawn += [
        {"context": row["context"], "series": BOUND, measure: row["best_micro_f1"]}
        for row in rows
        if row.get("best_micro_f1") is not None
    ]
    samples = {row["samples"] for row in rows if row.get("samples")}
    title = (
        f"Long documents, {samples.pop():,} trained on at every context"
        if len(samples) == 1
        else ""
    )
    return line_figure(drawn, "context", measure, "series", path, title=title, log_y=False)


def _scored(rows: Sequence[Row]) -> list[Row]:
    return [
        row for row in rows if row.get("micro_f1") is not None or row.get("accuracy") is not None
    ]


def _score(row: Row) -> float:
    return float(row["micro_f1"] if row.get("micro_f1") is not None else row["accuracy"])
