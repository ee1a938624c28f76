"""recipe=extend: train through the stages, score, and compare.

runs/extend/2026-11-28_18-00-00/
  start/               without model.path: the model that is extended, trained at its own context
  training/            the run through its stages; its scores are in it
  untouched/, scaled/  the scores of the model as it was, and with the last stage's rotary scaling
  result.json, *.png   the comparison
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashtrain.announce import say
from flashtrain.command.api import words_of
from flashtrain.command.compose import compose_settings
from flashtrain.folders.run_folder import BEST, find_checkpoint, settings_at
from flashtrain.integrations.huggingface_adapter import adapter_settings
from flashtrain.integrations.huggingface_config import read_config
from flashtrain.integrations.huggingface_folder import folder_of
from flashtrain.report.figures import Rows, line_figure
from flashtrain.report.rows import RESULT, Row
from flashtrain.report.table import make_table
from flashtrain.settings.command_line import CommandLine, quoted
from flashtrain.settings.settings import Settings
from flashtrain.tasks.language.stages import stages_of
from flashtrain.tasks.language.starting_weights import is_of_run
from flashtrain_recipes.context_study import NOT_FOR_TRAINING, Start, start_training
from flashtrain_recipes.ruler.scores import differences
from flashtrain_recipes.ruler.spec import Ruler
from flashtrain_recipes.study_parts import (
    Part,
    only,
    run_parts,
    training_part,
    with_words,
    without,
)

TRAINED, SCALED, UNTOUCHED, START = "training", "scaled", "untouched", "start"
SERIES = {UNTOUCHED: "untouched", SCALED: "scaling alone", TRAINED: "trained"}
# Settings of the model that the training alone has.
_OF_TRAINING = (
    "model.path", "model.config", "model.adapter", "model.adapter_rank", "model.adapter_alpha",
    "model.adapter_targets", "model.adapter_dropout", "model.quantize", "model.rope",
    "model.rope_factor", "model.rope_base",
)  # fmt: skip
_ROTARY = ("rope", "rope_factor", "rope_base")
_SCORES = (
    "series", "length", "score", "score_low", "score_high", "against_scaled", "against_scaled_low",
    "against_scaled_high", "against_untouched", "against_untouched_low", "against_untouched_high",
)  # fmt: skip
_LOSSES = ("series", "position", "loss", "loss_low", "loss_high", "gain", "gain_low", "gain_high")


def run_extend(
    settings: Settings, line: CommandLine, *, started: float, start: Start = start_training
) -> int:
    """Run what is left of the study, and return its exit status (run_parts)."""
    return run_parts(settings, line, parts=parts, compare=_compare, started=started, start=start)


def _compare(whole: Sequence[Part], folder: Path) -> tuple[list[Row], Row]:
    rows = compared(whole)
    _show(rows, folder)
    last = max((row for row in rows if row["series"] == SERIES[TRAINED]), key=_length)
    return rows, {"score": last.get("score")}


def parts(settings: Settings, line: CommandLine, folder: Path) -> Iterator[Part]:
    """Yield the study's commands in order. The untouched model is scored first: what is wrong with
    a score's settings or text shows before the training."""
    stages = [one.settings for one in stages_of(settings)]
    longest, path = max(one.context for one in stages), settings.model.path
    others = (*NOT_FOR_TRAINING, "recipe", "ruler", "positions", "model.path")
    training = [f"recipe={settings.recipe}", *without(line, others), "mode=train", "resume=auto"]
    new: list[str] = []
    if path is None:
        path = str(folder / START)
        begin = ["stages=[]", "model.adapter=null", f"data.split_context={longest}"]
        yield training_part(START, with_words(training, *begin), folder / START)
        demo = ["hardware.demo=always"] if settings.is_demo else []
        new = [*demo, "model.config=null", "model.options={}"]
    own = _own_context(settings, path)
    changed = _changed(settings)
    data = changed["data"] | {
        "data.validation_fraction": settings.data.validation_fraction,
        "data.split_context": longest,
    }
    of_tokens = {name: one for name, one in data.items() if name in Ruler().uses(settings)}
    model = without(only(line, ("model", "attention", "hardware", "mask")), _OF_TRAINING)
    # Of all weights: what START trains, and a folder that is neither a run nor an adapter.
    if settings.model.path is None or (folder_of(path) / "config.json").is_file():
        model.append("model.adapter=null")
    given = [f"recipe={settings.recipe}", *model, f"model.path={quoted(path)}"]
    given.append(f"context={min(own, longest)}")
    rotary = {f"model.{name}": getattr(stages[-1].model, name) for name in _ROTARY}
    scaling = words_of({name: one for name, one in rotary.items() if one is not None})
    lengths = settings.ruler.lengths or [own, longest]
    length = settings.positions.length or longest
    for name, words, most in (
        (UNTOUCHED, given, own),
        (SCALED, [*given, *scaling], None),
        (TRAINED, [f"checkpoint={quoted(str(folder / TRAINED))}"], None),
    ):
        at, common = folder / name, [*words, f"seed={settings.seed}"]
        if name == TRAINED:
            trains = with_words(training, *new, f"model.path={quoted(path)}")
            yield training_part(TRAINED, trains, at)
        else:
            common.append(f"output={quoted(str(at))}")
        fitting = [one for one in lengths if most is None or one <= most] or [most]
        ruler = words_of(changed["ruler"] | {"ruler.lengths": fitting})
        tokens = [] if name == TRAINED else words_of(of_tokens)
        score = ["mode=ruler", *common, *tokens, *ruler]
        yield Part(f"RULER, {SERIES[name]}", score, at, SERIES[name], "ruler", frozenset(ruler))
        # Longer than the longest length: all are scored on the same documents.
        positions = words_of(
            changed["positions"]
            | {
                "positions.length": min(length, most or length),
                "positions.at_least": max(settings.positions.at_least or 0, length + 1),
            }
        )
        text = [] if name == TRAINED else words_of(data)
        score = ["mode=positions", *common, *text, *positions]
        what, wanted = f"loss by position, {SERIES[name]}", frozenset(positions)
        yield Part(what, score, at, SERIES[name], "positions", wanted)


def _changed(settings: Settings) -> dict[str, dict[str, Any]]:
    """The settings of what is scored that are not the recipe's: the command line's and a demo's."""
    plain = compose_settings(CommandLine.of([f"recipe={settings.recipe}"]))
    return {
        group: {
            f"{group}.{name}": value
            for name, value in asdict(getattr(settings, group)).items()
            if value != getattr(getattr(plain, group), name)
        }
        for group in ("data", "ruler", "positions")
    }


def _own_context(settings: Settings, path: str) -> int:
    """The context in tokens that the model was trained with before."""
    if settings.model.path is None:
        return settings.context
    if is_of_run(Path(path).expanduser()):
        return settings_at(*find_checkpoint(path, prefer=BEST, setting="model.path")).context
    base = (adapter_settings(path) or {"path": path})["path"]
    config = read_config(str(folder_of(base)), settings.model.options).get_text_config()
    return getattr(config, "max_position_embeddings", None) or settings.context


def compared(whole: Sequence[Part]) -> list[Row]:
    """Return the rows of all scores; those of the trained model's RULER have its differences to the
    others too, in pairs of the same prompts."""
    rows = {(part.series, part.mode): part.rows() for part in whole if part.mode}
    trained = rows[SERIES[TRAINED], "ruler"]
    for name in (SCALED, UNTOUCHED):
        others = rows[SERIES[name], "ruler"]
        known = {row["length"] for row in others}
        both = [row for row in trained if row["length"] in known]
        for row, found in zip(both, differences(both, others), strict=True):
            for end in ("", "_low", "_high"):
                row[f"against_{name}{end}"] = found[f"difference{end}"]
    order = sorted(rows, key=lambda one: one[1] != "ruler")
    return [row for one in order for row in rows[one]]


def _length(row: Row) -> int:
    return int(row["length"]) if row["part"] == "ruler" else 0


def _show(rows: Sequence[Row], folder: Path) -> None:
    scores = [row for row in rows if row["part"] == "ruler"]
    losses = [row for row in rows if row["part"] == "positions"]
    make_table(scores, _SCORES, "RULER, mean over tasks; against: paired differences").print()
    make_table(losses, _LOSSES, "loss in nats a token of held-out documents").print()
    say(f"drawn in {extend_figure(rows, folder / 'extend.png')}; the rows are in {folder / RESULT}")


def extend_figure(rows: Rows, path: str | Path) -> Path:
    """Draw RULER's mean against the prompts' length, with 95% intervals, a line a model."""
    drawn = [row for row in rows if row.get("part") == "ruler"]
    return line_figure(drawn, "length", "score", "series", path, title="RULER, mean over tasks")
