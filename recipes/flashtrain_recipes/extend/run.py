"""recipe=extend: train through the stages, score, and compare.

runs/extend/2026-11-28_18-00-00/
  start/               without model.path: the model that is extended, trained at its own context
  training/            the run through its stages; its scores are in it
  untouched/, scaled/  the scores of the model as it was, and with the last stage's rotary scaling
  result.json, *.png   the comparison

Each part is a command of its own. What is finished in the folder is not done again; an
interrupted part goes on.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flashtrain.announce import say
from flashtrain.command.api import words_of
from flashtrain.command.compose import compose_settings
from flashtrain.folders.new_folder import locked
from flashtrain.folders.run_folder import (
    FAILED,
    FINISHED,
    RUNNING,
    STOPPED,
    read_summary,
    write_config,
    write_summary,
)
from flashtrain.integrations.huggingface_config import read_config
from flashtrain.integrations.huggingface_folder import folder_of
from flashtrain.report.figures import Rows, line_figure
from flashtrain.report.rows import RESULT, Row, command_line, read_result, write_result
from flashtrain.report.table import make_table
from flashtrain.run.job import write_report
from flashtrain.run.machine import adapt_to_machine
from flashtrain.run.train import planned_row
from flashtrain.settings.command_line import CommandLine, quoted
from flashtrain.settings.settings import Settings
from flashtrain.tasks.language.stages import stages_of
from flashtrain_recipes.context_study import (
    ENDED,
    NOT_FOR_TRAINING,
    Start,
    start_training,
    study_folder,
)
from flashtrain_recipes.ruler.scores import differences
from flashtrain_recipes.ruler.spec import Ruler

TRAINED, SCALED, UNTOUCHED, START = "training", "scaled", "untouched", "start"
SERIES = {UNTOUCHED: "untouched", SCALED: "scaling alone", TRAINED: "trained"}
# Settings of the model that the training alone has.
_OF_TRAINING = ("model.path", "model.adapter", "model.config", "model.rope")
_ROTARY = ("rope", "rope_factor", "rope_base")
_SCORES = (
    "series", "length", "score", "score_low", "score_high", "against_scaled", "against_scaled_low",
    "against_scaled_high", "against_untouched", "against_untouched_low", "against_untouched_high",
)  # fmt: skip
_LOSSES = ("series", "position", "loss", "loss_low", "loss_high", "gain", "gain_low", "gain_high")


@dataclass(frozen=True)
class Part:
    """One command of the study."""

    name: str
    words: Sequence[str]
    is_done: Callable[[], object]  # true once its results are there


def run_extend(
    settings: Settings, line: CommandLine, *, started: float, start: Start = start_training
) -> int:
    """Run what is left of the study, and return its exit status.

    Args:
        line: the command line.
        started: time.monotonic() at the command's start.
        start: runs a part, given its command line, and returns its exit status.
    """
    settings, hardware = adapt_to_machine(settings, line)
    folder = study_folder(settings, line)
    with locked(folder):
        write_config(asdict(settings), folder)
        planned = planned_row(settings, hardware, line)
        write_summary(folder, {**planned, "status": RUNNING})
        for part in parts(settings, line, folder):
            if part.is_done():
                say(f"\n=== {part.name}: done already")
                continue
            say(f"\n=== {part.name}: python -m flashtrain {' '.join(part.words)}")
            if status := start(list(part.words)):
                ended = status in ENDED
                why = f"stopped by {signal.Signals(status - 128).name}" if ended else "failed"
                end = {"status": STOPPED if ended else FAILED, "error": f"{part.name}: {why}"}
                write_summary(folder, {**planned, **end})
                say(f"{part.name} {why}. Repeat the command with resume={folder} to go on.")
                return status
        rows = [*_score_rows(folder), *_loss_rows(folder)]
        write_result(folder / RESULT, settings.recipe, command_line(line), rows)
        _show(rows, folder)
        last = max((row for row in rows if row["series"] == SERIES[TRAINED]), key=_length)
        row = {**planned, "status": FINISHED, "score": last.get("score")}
        row["seconds"] = round(time.monotonic() - started, 1)
        write_report(folder, row)
        write_summary(folder, row)
    return 0


def parts(settings: Settings, line: CommandLine, folder: Path) -> Iterator[Part]:
    """Yield the study's commands in order."""
    path, run = settings.model.path, folder / TRAINED
    others = (*NOT_FOR_TRAINING, "recipe", "ruler", "positions")
    training = [f"recipe={settings.recipe}", *_without(line, others), "mode=train", "resume=auto"]
    if path is None:
        path = str(folder / START)
        yield _trains(START, [*training, "stages=[]", "model.adapter=null"], folder / START)
        demo = ["hardware.demo=always"] if settings.is_demo else []
        training += [*demo, "model.config=null", "model.options={}"]
    yield _trains(TRAINED, [*training, f"model.path={quoted(path)}"], run)
    stages = [one.settings for one in stages_of(settings)]
    longest, own = max(one.context for one in stages), _own_context(settings, path)
    changed = _changed(settings)
    data = changed["data"] | {
        "data.validation_fraction": settings.data.validation_fraction,
        "data.split_context": longest,
    }
    model = [*_without(_only(line, ("model",)), _OF_TRAINING), "model.adapter=null"]
    given = [f"recipe={settings.recipe}", *model, f"model.path={quoted(path)}"]
    of_tokens = {name: one for name, one in data.items() if name in Ruler().uses(settings)}
    rotary = {f"model.{name}": getattr(stages[-1].model, name) for name in _ROTARY}
    scaling = words_of({name: one for name, one in rotary.items() if one is not None})
    lengths = settings.ruler.lengths or [own, longest]
    length = settings.positions.length or longest
    for name, words, most in (
        (UNTOUCHED, given, own),
        (SCALED, [*given, *scaling], max(lengths)),
        (TRAINED, [f"checkpoint={quoted(str(run))}"], max(lengths)),
    ):
        words = [*words, f"seed={settings.seed}"]
        if name == TRAINED:
            data = of_tokens = {}
        else:
            words.append(f"output={quoted(str(folder / name))}")
        ruler = changed["ruler"] | {
            "ruler.lengths": [one for one in lengths if one <= most] or [most]
        }
        yield Part(
            f"RULER, {SERIES[name]}",
            ["mode=ruler", *words, *words_of(of_tokens | ruler)],
            partial(_means, folder / name),
        )
        # Longer than the longest length: all are scored on the same documents.
        positions = changed["positions"] | {
            "positions.length": min(length, most),
            "positions.at_least": length + 1,
        }
        yield Part(
            f"loss by position, {SERIES[name]}",
            ["mode=positions", *words, *words_of(data | positions)],
            partial(_rows, folder / name, "positions"),
        )


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


def _trains(name: str, words: Sequence[str], run: Path) -> Part:
    at = f"hydra.run.dir={quoted(str(run))}"
    return Part(name, [*words, at], lambda: read_summary(run).get("status") == FINISHED)


def _only(words: Sequence[str], names: Sequence[str]) -> list[str]:
    return [word for word in words if _setting(word).startswith(tuple(names))]


def _without(words: Sequence[str], names: Sequence[str]) -> list[str]:
    return [word for word in words if not _setting(word).startswith(tuple(names))]


def _setting(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _own_context(settings: Settings, path: str) -> int:
    """The context in tokens that the model was trained with before."""
    if settings.model.path is None:
        return settings.context
    config = read_config(str(folder_of(path)), settings.model.options).get_text_config()
    return getattr(config, "max_position_embeddings", None) or settings.context


def _rows(folder: Path, mode: str) -> list[Row]:
    """The rows of a mode's newest result in the folder of a part."""
    found = sorted(folder.glob(f"**/{mode}*/{RESULT}"), key=lambda path: path.stat().st_mtime)
    return list(read_result(found[-1]).rows) if found else []


def _means(folder: Path) -> list[Row]:
    """RULER's mean at each length; empty until all are scored, since means are written last."""
    return [row for row in _rows(folder, "ruler") if row["task"] == "mean"]


def _score_rows(folder: Path) -> list[Row]:
    """RULER's mean by model and length; of the trained one its paired differences too."""
    means = {name: _means(folder / name) for name in SERIES}
    rows = [
        {"part": "ruler", **row, "series": SERIES[name]} for name in means for row in means[name]
    ]
    for name in (SCALED, UNTOUCHED):
        others = {row["length"] for row in means[name]}
        both = [row for row in means[TRAINED] if row["length"] in others]
        for found in differences(both, means[name]):
            (own,) = (
                row
                for row in rows
                if row["series"] == SERIES[TRAINED] and row["length"] == found["length"]
            )
            for end in ("", "_low", "_high"):
                own[f"against_{name}{end}"] = found[f"difference{end}"]
    return rows


def _loss_rows(folder: Path) -> list[Row]:
    return [
        {"part": "positions", **row, "series": SERIES[name]}
        for name in SERIES
        for row in _rows(folder / name, "positions")
    ]


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
