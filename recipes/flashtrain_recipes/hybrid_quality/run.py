"""recipe=hybrid-quality: train a decoder for each pattern of layers, score and compare them.

runs/hybrid-quality/2026-11-29_10-00-00/
  full-0/, full-1/, gla-0/, ...   the runs, PATTERN-SEED; their scores are in them
  result.json, *.png              the comparison
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashtrain.announce import say
from flashtrain.command.api import words_of
from flashtrain.report.figures import line_figure
from flashtrain.report.rows import RESULT, Row
from flashtrain.report.table import make_table
from flashtrain.settings.command_line import CommandLine, quoted
from flashtrain.settings.settings import Settings
from flashtrain_recipes.context_study import NOT_FOR_TRAINING, Start, start_training
from flashtrain_recipes.loss_by_position.run import COMPARED, differences
from flashtrain_recipes.study_parts import Part, run_parts, training_part, with_words, without

_LOSSES = ("series", "position", "loss", "loss_low", "loss_high", *COMPARED)
_SCORES = ("series", "length", "score", "score_low", "score_high")


def run_patterns(
    settings: Settings, line: CommandLine, *, started: float, start: Start = start_training
) -> int:
    """Run what is left of the study, and return its exit status (run_parts)."""
    return run_parts(settings, line, parts=parts, compare=compare, started=started, start=start)


def parts(settings: Settings, line: CommandLine, folder: Path) -> Iterator[Part]:
    """Yield the study's commands in order."""
    others = (*NOT_FOR_TRAINING, "recipe", "patterns", "ruler", "positions")
    training = [f"recipe={settings.recipe}", *without(line, others), "mode=train", "resume=auto"]
    training += ["hardware.demo=always"] if settings.is_demo else []
    given: dict[str, list[str]] = {}
    for mode in ("positions", "ruler"):
        values: dict[str, Any] = asdict(getattr(settings, mode))
        own = {f"{mode}.{name}": value for name, value in values.items() if value is not None}
        given[mode] = words_of(own)
    for pattern in settings.patterns.compared:
        seeds = settings.patterns.seeds if pattern == settings.patterns.compared[0] else 1
        for seed in range(settings.seed, settings.seed + seeds):
            series = pattern if seed == settings.seed else f"{pattern}, seed {seed}"
            run = folder / f"{pattern.replace(':', '')}-{seed}"
            own = {"model.pattern": pattern.split("+"), "seed": seed}
            yield training_part(series, with_words(training, *words_of(own)), run)
            for mode, words in given.items():  # all on the same documents and prompts
                score = [f"mode={mode}", f"checkpoint={quoted(str(run))}", f"seed={settings.seed}"]
                score += words
                yield Part(f"{mode}, {series}", score, run, series, mode, frozenset(words))


def compare(whole: Sequence[Part], folder: Path) -> tuple[list[Row], Row]:
    """Show the scores, and return their rows; losses by position have their differences to the
    first run's."""
    rows = {(part.mode, part.series): part.rows() for part in whole if part.mode}
    first = next(found for (mode, _), found in rows.items() if mode == "positions")
    losses = [
        row
        for (mode, _), found in rows.items()
        if mode == "positions"
        for row in differences(found, first, seed=0)
    ]
    scores = [row for (mode, _), found in rows.items() if mode == "ruler" for row in found]
    make_table(losses, _LOSSES, "nats a token of held-out documents; less the first's").print()
    make_table(scores, _SCORES, "RULER, mean over tasks").print()
    for name, y, x, shown in (
        ("loss", "loss", "end", losses),
        ("ruler", "score", "length", scores),
    ):
        path = line_figure(shown, x, y, "series", folder / f"{name}.png")
        say(f"drawn in {path}; the rows are in {folder / RESULT}")
    return [*losses, *scores], {}
