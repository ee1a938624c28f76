"""mode=lengths, recipe=gpt2-long: train each context length in a process of its own, score all on the same tokens.

runs/gpt2-long/2026-11-21_10-15-02/
  context-1024/, context-2048/, ...   the trainings, each a run folder like any other, with its losses in scores.npz
  config.yaml, summary.json           as every run
  result.json                         the rows, in the form of recipes/results
  lengths.png, positions.png          perplexity and time against context; loss along the scored tokens

A length that is finished there is not trained again, and one that was interrupted goes on from its checkpoint.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashtrain.command.announce import say
from flashtrain.command.compose import override_keys, parse_overrides, quoted
from flashtrain.command.job_process import JobProcesses
from flashtrain.command.quiet import quieten
from flashtrain.command.sweep import note_failure
from flashtrain.errors import UserError
from flashtrain.run.machine import settle
from flashtrain.run.plan import plan
from flashtrain.run.run import make_data
from flashtrain.run.run_folder import (
    CHECKPOINTS,
    FAILED,
    FINISHED,
    LAST,
    OUT_OF_MEMORY,
    RUNNING,
    STOPPED,
    find_same,
    new_run_folder,
    newest_first,
    read_summary,
    remove_unused,
    write_config,
    write_summary,
)
from flashtrain.run.run_lock import hold, let_go
from flashtrain.run.summary import planned_row
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain.training.loggers import log_figure
from flashtrain_recipes.long_context.compare import LENGTHS, length_rows, position_rows, remarks
from flashtrain_recipes.long_context.evaluate import KEPT_SCORES, Scores, Windows, held_out_windows, kept_scores
from flashtrain_recipes.long_context.figures import lengths_figure, lengths_table, positions_figure
from flashtrain_recipes.report.rows import RESULT, Row, has_failed, write_result

PREFIX = "context-"
# Of the command line, what is the comparison's own and not a training's.
NOT_FOR_TRAINING = ("mode", "resume", "data.split_context", "hydra.run.dir", "logger.group")

Start = Callable[[list[str]], int]


def start_training(words: list[str]) -> int:
    """Run the command with these words as a process of its own; its exit status, negative for a signal.

    A signal that ends this command is passed on, and waited for: the training writes its checkpoint.
    """
    with JobProcesses() as processes:
        status = processes.run(words)
    if processes.stopped_by is None:
        return status
    return -signal.SIGINT if processes.stopped_by == signal.SIGINT else -signal.SIGTERM


def run_lengths(settings: Settings, overrides: list[str], *, started: float, start: Start = start_training) -> int:
    """Train what is not trained yet, score, and report. Returns the exit status: 0 unless a training failed.

    overrides: the command line's. started: time.time() at its start. start: runs the command with the words it is
    given, in a process of its own, and returns its exit status. Running out of memory is a result, not a failure.
    Raises UserError before anything is trained for what cannot work.
    """
    quieten()
    settings, hardware = settle(settings, overrides)
    settings = _prepared(settings, hardware, overrides)
    windows = _windows(settings, hardware)
    with comparison_folder(settings, overrides) as folder:
        return _compare(settings, hardware, folder, windows, overrides, started=started, start=start)


def _compare(
    settings: Settings,
    hardware: Hardware,
    folder: Path,
    windows: Windows,
    overrides: list[str],
    *,
    started: float,
    start: Start,
) -> int:
    write_config(settings, folder)
    planned = _planned(settings, hardware, overrides)
    write_summary(folder, {**planned, "status": RUNNING})
    say(f"comparing contexts {', '.join(f'{context:,}' for context in _contexts(settings))} in {folder}")

    for context in _contexts(settings):
        status = _train(context, settings, folder, overrides, start)
        for number in (signal.SIGINT, signal.SIGTERM):
            if status in (-number, 128 + number):
                say(f"stopped: the same command, with resume=auto or resume={folder}, goes on at context {context:,}.")
                write_summary(folder, {**planned, "status": STOPPED, "error": f"stopped by {number.name}"})
                return 128 + number
        _scores(settings, hardware, folder, windows, context)

    rows = _scored_rows(settings, hardware, folder, windows)
    write_result(
        folder / RESULT,
        settings.recipe,
        comparison_command(settings, overrides, sorted(row["context"] for row in rows if row["part"] == LENGTHS)),
        rows,
    )
    _report(settings, folder, rows)
    failed = [row for row in rows if has_failed(row) and row.get("status") != OUT_OF_MEMORY]
    summary = {**planned, **study_status(failed), **_best(rows), "seconds": round(time.time() - started, 1)}
    write_summary(folder, summary)
    return 1 if failed else 0


def lengths_plan(settings: Settings, hardware: Hardware) -> str:
    """mode=plan: what each length's training would take, and nothing started."""
    parts = [
        f"=== context {context:,}\n{plan(replace(settings, context=context), hardware)}"
        for context in _contexts(settings)
    ]
    return "\n".join(parts)


def study_status(failed: Sequence[Row]) -> dict[str, Any]:
    """What a comparison's summary says: finished, or failed, with the words of the first training that did."""
    if not failed:
        return {"status": FINISHED}
    first = failed[0]
    return {"status": FAILED, "error": f"context {first.get('context')}: {first.get('error') or 'failed'}"}


def trained_contexts(folder: Path) -> list[int]:
    """The context lengths that have a folder in a comparison's folder, ascending."""
    found = [path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*") if path.is_dir()]
    return sorted(int(name) for name in found if name.isdigit())


def _contexts(settings: Settings) -> list[int]:
    return sorted(settings.lengths.contexts or [])


def _prepared(settings: Settings, hardware: Hardware, overrides: Sequence[str]) -> Settings:
    """The settings with the split that all lengths share. Raises UserError for what no length could be trained by."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError(
            "mode=lengths starts its trainings itself: leave torchrun out and say trainer.devices=N, "
            "which each of them then uses."
        )
    if "context" in override_keys(overrides):
        raise UserError(
            f"recipe={settings.recipe} trains every length of lengths.contexts={list(settings.lengths.contexts or [])}:"
            " change those, or add mode=train to train one context."
        )
    settings.lengths.check_together()
    for context in _contexts(settings):
        replace(settings, context=context).check_step()
    return replace(settings, data=replace(settings.data, split_context=settings.lengths.longest))


def _planned(settings: Settings, hardware: Hardware, overrides: list[str]) -> Row:
    """What is known beforehand of the comparison's own summary row: that of a training, with all its contexts."""
    row = planned_row(settings, hardware, overrides)
    row.update(context=None, batch=None, contexts=" ".join(map(str, _contexts(settings))))
    return row


@contextmanager
def comparison_folder(settings: Settings, overrides: Sequence[str]) -> Iterator[Path]:
    """The folder of the comparison to go on with, or a new one, held by this process within the context.

    A sweep over comparisons names its own. Raises UserError where another process runs in the folder named.
    """
    folder = _folder(settings, overrides)
    try:
        hold(folder)
        yield folder
    finally:
        let_go(folder)
        remove_unused(folder)


def _folder(settings: Settings, overrides: Sequence[str]) -> Path:
    parent = Path(settings.output) / settings.recipe
    for override in parse_overrides(overrides):
        if override.get_key_element() == "hydra.run.dir":
            return Path(str(override.value()))
    if settings.resume is None:
        return new_run_folder(parent)
    if settings.resume != "auto":
        given = Path(settings.resume).expanduser()
        if find_same([given], settings) is None:
            raise UserError(f"resume={given} is no comparison of these settings: name its folder, or say resume=auto.")
        return given
    found = find_same(newest_first(parent), settings, take=True)
    if found is None:
        return new_run_folder(parent)
    say(f"going on with {found}: what is finished there is not trained again (resume=null starts anew).")
    return found


def _windows(settings: Settings, hardware: Hardware) -> Windows:
    """The held-out text to score on, looked for before hours of training."""
    data = make_data(replace(settings, context=min(_contexts(settings))), hardware)
    data.prepare_data()
    data.setup()
    say(data.describe())
    asked = settings.lengths
    held_out = data.split.validation
    if held_out is None:
        raise UserError(
            f"no text can be held out for windows of {asked.longest} tokens: use more text, raise "
            "data.validation_fraction, or lower lengths.window and lengths.contexts."
        )
    windows = held_out_windows(data.cache, held_out, window=asked.longest, most=asked.windows)
    how = f"of {windows.count} documents" if windows.unit == "documents" else "of one text"
    say(f"scored: the last {asked.scored:,} of {asked.longest:,} held-out tokens, {len(windows.tokens)} times, {how}")
    return windows


def _train(context: int, settings: Settings, folder: Path, overrides: Sequence[str], start: Start) -> int:
    """Train one length unless it is trained, and return its exit status."""
    run = folder / f"{PREFIX}{context}"
    if read_summary(run).get("status") == FINISHED:
        say(f"\n=== context {context:,}: trained already")
        return 0
    say(f"\n=== context {context:,}")
    run.mkdir(exist_ok=True)
    (run / KEPT_SCORES).unlink(missing_ok=True)
    words = training_words(context, settings, folder, overrides)
    words.append(f"data.split_context={settings.data.split_context}")
    status = start(words)
    note_failure(run, words, status)
    return status


def training_words(context: int, settings: Settings, folder: Path, overrides: Sequence[str]) -> list[str]:
    """The command's words for the training of one context in a comparison's folder."""
    own = tuple(f"{key}=" for key in NOT_FOR_TRAINING)
    group = settings.logger.group or f"{settings.recipe}-{folder.name}"
    run = folder / f"{PREFIX}{context}"
    words = [word for word in overrides if not word.lstrip("+~").startswith((*own, "lengths."))]
    words += ["mode=train", f"context={context}", "resume=auto"]
    return [*words, f"logger.group={quoted(group)}", f"hydra.run.dir={quoted(str(run))}"]


def _scores(settings: Settings, hardware: Hardware, folder: Path, windows: Windows, context: int) -> Scores | None:
    """The losses of one length's model; None where its training has not finished."""
    run = folder / f"{PREFIX}{context}"
    if read_summary(run).get("status") != FINISHED:
        return None
    asked = settings.lengths
    return kept_scores(
        run,
        f"{CHECKPOINTS}/{LAST}",
        windows.tokens,
        hardware,
        context=context,
        scored=asked.scored,
        stride=asked.stride,
    )


def _scored_rows(settings: Settings, hardware: Hardware, folder: Path, windows: Windows) -> list[Row]:
    """The rows of every length trained in the folder, those of an earlier command too."""
    asked = settings.lengths
    contexts = [context for context in trained_contexts(folder) if asked.scored <= context <= asked.longest]
    trained = {context: read_summary(folder / f"{PREFIX}{context}") for context in contexts}
    found = {context: _scores(settings, hardware, folder, windows, context) for context in contexts}
    scores = {context: losses for context, losses in found.items() if losses is not None}
    rows = length_rows(trained, scores, windows, resamples=asked.resamples, seed=settings.seed)
    return [*rows, *position_rows(scores, asked.bins)]


def _report(settings: Settings, folder: Path, rows: list[Row]) -> None:
    """Print table and remarks, draw the figures, and log the first."""
    if not any(row.get("perplexity") is not None for row in rows):
        say("nothing could be scored: no training finished.")
        return
    shown = lengths_table(rows)
    shown.print()
    lines = remarks(rows)
    if not lines and len(shown.rows) > 1:
        lines = ["every longer context was better than the next shorter one"]
    for line in lines:
        say(line)
    figure = lengths_figure(rows, folder / "lengths.png")
    say(f"figures: {figure}, {positions_figure(rows, folder / 'positions.png')}; rows: {folder / RESULT}")
    say(f"  publish them: python -m flashtrain_recipes.report {folder} --save recipes/results/NAME.json")
    logger = settings.logger
    if logger.name == "wandb":
        group = logger.group or f"{settings.recipe}-{folder.name}"
        log_figure(logger.project, group=group, folder=folder, figure=figure, mode=logger.mode)


def _best(rows: Sequence[Row]) -> dict[str, Any]:
    """The summary row's figures: the lowest perplexity and the context that reached it."""
    scored = [row for row in rows if row["part"] == LENGTHS and row.get("perplexity") is not None]
    if not scored:
        return {}
    best = min(scored, key=lambda row: row["perplexity"])
    return {"best_context": best["context"], "perplexity": best["perplexity"], "lengths_scored": len(scored)}


def comparison_command(settings: Settings, overrides: Sequence[str], contexts: Sequence[int]) -> str:
    """What reproduces the rows of these contexts, whichever commands trained them, without where it wrote and whom it
    told."""
    told = [word for word in overrides if not word.lstrip("+~").startswith(("output", "logger", "hydra", "resume"))]
    if list(contexts) != _contexts(settings):
        told = [word for word in told if not word.startswith("lengths.contexts=")]
        told.append(f"lengths.contexts=[{','.join(map(str, contexts))}]")
    return " ".join(["python -m flashtrain", *map(shlex.quote, told)])
