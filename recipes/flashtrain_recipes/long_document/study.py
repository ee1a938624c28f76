"""mode=lengths of task=fine_tuning, recipe=long-document: a training for each context, at equal samples, and its score.

runs/long-document/2026-11-21_10-15-02/
  context-512/, context-1024/, ...   the trainings, each a run folder like any other
  config.yaml, summary.json          as every run
  result.json                        the rows, in the form of recipes/results
  score.png                          score against context, the bound beside it

A context that is finished there is not trained again, and one that was interrupted goes on from its checkpoint.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashtrain.command.announce import say
from flashtrain.command.compose import override_keys
from flashtrain.command.quiet import quieten
from flashtrain.command.sweep import note_failure
from flashtrain.errors import UserError
from flashtrain.run.machine import settle
from flashtrain.run.run_folder import (
    FINISHED,
    OUT_OF_MEMORY,
    RUNNING,
    STOPPED,
    read_summary,
    write_config,
    write_summary,
)
from flashtrain.run.summary import planned_row
from flashtrain.settings.settings import Settings
from flashtrain.tasks.fine_tuning.plan import plan_fine_tuning
from flashtrain.tasks.fine_tuning.rows import score_of
from flashtrain.tasks.fine_tuning.splits import check_trainable, read_rows
from flashtrain.tasks.fine_tuning.steps import check_fine_tuning_step
from flashtrain.training.hardware import Hardware
from flashtrain.training.loggers import log_figure
from flashtrain_recipes.long_context.study import (
    PREFIX,
    Start,
    comparison_command,
    comparison_folder,
    start_training,
    study_status,
    trained_contexts,
    training_words,
)
from flashtrain_recipes.report.figures import line_figure
from flashtrain_recipes.report.rows import RESULT, Row, has_failed, write_result
from flashtrain_recipes.report.table import make_table

_HEIGHT = 4.2
BOUND = "the most that can be expected of a reader of so many tokens"


def documents_figure(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Draw the score (micro-F1, or accuracy) against context, with the bound where it is known. Returns the path.

    Raises UserError for rows of another recipe.
    """
    measure = next((key for key in ("micro_f1", "accuracy") if any(row.get(key) is not None for row in rows)), None)
    if measure is None or not any(row.get("context") for row in rows):
        raise UserError("these rows have no score by context: they are not of recipe=long-document.")
    drawn: list[Row] = [{**row, "series": f"flashtrain, {row.get('model', 'BERT')}"} for row in rows]
    drawn += [
        {"context": row["context"], "series": BOUND, measure: row["best_micro_f1"]}
        for row in rows
        if row.get("best_micro_f1") is not None
    ]
    samples = {row["samples"] for row in rows if row.get("samples")}
    title = f"{samples.pop():,} texts trained on at every context" if len(samples) == 1 else ""
    return line_figure(drawn, "context", measure, "series", path, title=title, height=_HEIGHT, log_y=False)


FIGURE = "score.png"
# Of each training's row, what the table of the comparison shows.
_TABLE = (
    "context", "micro_f1", "accuracy", "best_micro_f1", "validation_loss", "samples", "batch", "micro_batch",
    "tokens_per_second", "mfu", "peak_memory_gib", "seconds", "status",
)  # fmt: skip
_NOT_KEPT = ("device", "versions", "overrides", "date", "recipe", "devices")  # true of the whole result


def run_contexts(settings: Settings, overrides: list[str], *, started: float, start: Start = start_training) -> int:
    """Train what is not trained yet, and report. Returns the exit status: 0 unless a training failed.

    overrides: the command line's. started: time.time() at its start. start: see long_context.study.run_lengths.
    Raises UserError before anything is trained for what cannot work.
    """
    quieten()
    settings, hardware = settle(settings, overrides)
    _check(settings, overrides)
    with comparison_folder(settings, overrides) as folder:
        return _compare(settings, hardware, folder, overrides, start=start)


def _compare(settings: Settings, hardware: Hardware, folder: Path, overrides: list[str], *, start: Start) -> int:
    write_config(settings, folder)
    contexts = sorted(settings.lengths.contexts or [])
    planned = planned_row(settings, hardware, overrides)
    planned.update(context=None, contexts=" ".join(map(str, contexts)))
    write_summary(folder, {**planned, "status": RUNNING})
    say(f"comparing contexts {', '.join(f'{context:,}' for context in contexts)} in {folder}")
    for context in contexts:
        status = _train(context, settings, folder, overrides, start)
        for number in (signal.SIGINT, signal.SIGTERM):
            if status in (-number, 128 + number):
                say(f"stopped: the same command, with resume=auto or resume={folder}, goes on at context {context:,}.")
                write_summary(folder, {**planned, "status": STOPPED, "error": f"stopped by {number.name}"})
                return 128 + number
    rows = context_rows(folder)
    write_result(
        folder / RESULT, settings.recipe, comparison_command(settings, overrides, trained_contexts(folder)), rows
    )
    _report(settings, folder, rows)
    failed = [row for row in rows if has_failed(row) and row.get("status") != OUT_OF_MEMORY]
    # The trainings' own, those of an earlier command too.
    seconds = round(sum(row.get("seconds") or 0.0 for row in rows), 1)
    write_summary(folder, {**planned, **study_status(failed), **_best(rows), "seconds": seconds})
    return 1 if failed else 0


def contexts_plan(settings: Settings, hardware: Hardware) -> str:
    """mode=plan: what each context's training would take, and nothing started."""
    contexts = sorted(settings.lengths.contexts or [])
    parts = [
        f"=== context {context:,}\n{plan_fine_tuning(replace(settings, context=context), hardware)}"
        for context in contexts
    ]
    return "\n".join(parts)


def context_rows(folder: Path) -> list[Row]:
    """The row of every context trained in the folder, those of an earlier command too; `seconds` are the command's."""
    rows = []
    for context in trained_contexts(folder):
        summary = read_summary(folder / f"{PREFIX}{context}")
        kept: dict[str, Any] = {key: value for key, value in summary.items() if key not in _NOT_KEPT}
        if kept.get("status") == FINISHED:
            del kept["status"]
        rows.append({"implementation": "flashtrain", **kept, "context": context})
    return rows


def _check(settings: Settings, overrides: Sequence[str]) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError(
            "mode=lengths starts its trainings itself: leave torchrun out and say trainer.devices=N, "
            "which each of them then uses."
        )
    contexts = list(settings.lengths.contexts or [])
    if "context" in override_keys(overrides):
        raise UserError(
            f"recipe={settings.recipe} trains every context of lengths.contexts={contexts}: change those, or add "
            "mode=train to train one context."
        )
    for context in contexts:
        check_fine_tuning_step(replace(settings, context=context))
    if settings.finetune.data != "cues":
        check_trainable(read_rows(settings.finetune), settings.finetune)


def _train(context: int, settings: Settings, folder: Path, overrides: Sequence[str], start: Start) -> int:
    """Train one context unless it is trained, and return its exit status."""
    run = folder / f"{PREFIX}{context}"
    if read_summary(run).get("status") == FINISHED:
        say(f"\n=== context {context:,}: trained already")
        return 0
    say(f"\n=== context {context:,}")
    run.mkdir(exist_ok=True)
    words = training_words(context, settings, folder, overrides)
    status = start(words)
    note_failure(run, words, status)
    return status


def _report(settings: Settings, folder: Path, rows: list[Row]) -> None:
    """Print the table, draw the figure, and log it."""
    columns = [key for key in _TABLE if any(row.get(key) is not None for row in rows)]
    make_table(rows, columns, "score on test texts by context, at equal samples").print()
    scored = [row for row in rows if row.get("micro_f1") is not None or row.get("accuracy") is not None]
    if not scored:
        say("nothing could be scored: no training finished.")
        return
    figure = documents_figure(rows, folder / FIGURE)
    say(f"figure: {figure}; rows: {folder / RESULT}")
    say(f"  publish them: python -m flashtrain_recipes.report {folder} --save recipes/results/NAME.json")
    logger = settings.logger
    if logger.name == "wandb":
        group = logger.group or f"{settings.recipe}-{folder.name}"
        log_figure(logger.project, group=group, folder=folder, figure=figure, mode=logger.mode)
    best = max(scored, key=_score)
    say(f"best: context {best['context']:,}, {score_of(best)}")


def _score(row: Row) -> float:
    return float(row["micro_f1"] if row.get("micro_f1") is not None else row["accuracy"])


def _best(rows: Sequence[Row]) -> dict[str, Any]:
    """The summary row's figures: the best score and the context that reached it."""
    scored = [row for row in rows if row.get("micro_f1") is not None or row.get("accuracy") is not None]
    if not scored:
        return {}
    best = max(scored, key=_score)
    return {"best_context": best["context"], "score": _score(best), "contexts_scored": len(scored)}
