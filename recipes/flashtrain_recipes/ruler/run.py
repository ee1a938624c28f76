"""mode=ruler: have a model answer RULER's prompts, score the answers, and save them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch

from flashtrain.announce import say
from flashtrain.folders.new_folder import make_unique
from flashtrain.models.generation import generate
from flashtrain.report.figures import INK, new_figure, save, style, tokens_label
from flashtrain.report.rows import RESULT, Row, Rows, read_result, write_result
from flashtrain.report.table import View
from flashtrain.settings.settings import Settings
from flashtrain.spec import TrainedModel
from flashtrain.tasks.attention_masks import make_mask
from flashtrain.tasks.language.ends import generation_ends
from flashtrain.tasks.language.evaluate import read_model
from flashtrain.training.hardware import Hardware
from flashtrain.training.memory_measure import AUTOCAST
from flashtrain_recipes.ruler.haystack import read_haystack
from flashtrain_recipes.ruler.prompts import encoder, make_prompt
from flashtrain_recipes.ruler.scores import mean_rows, scored
from flashtrain_recipes.ruler.tasks import TASKS, score
from flashtrain_recipes.scored_command import scored_command


def evaluate_ruler(
    settings: Settings, hardware: Hardware, *, uses: Callable[[Settings], Iterable[str]]
) -> list[Row]:
    """Score a model on RULER's tasks; print the table, write the rows, the answers and the heat map
    to a folder (ruler, ruler-2, ... in the run's, or below `output`), and return the rows.

    A result that the same command began and did not finish is gone on with.

    Args:
        uses: names the settings that decide the rows (the mode's own `uses`).

    Raises:
        UserError: the model cannot read the longest prompt, or the shortest has no room for a task.
    """
    options = settings.ruler
    lengths, tasks = options.lengths or [settings.context], options.tasks or list(TASKS)
    trained = read_model(settings.having(context=max(lengths)), hardware)
    template = bool(getattr(trained.tokenizer, "config", {}).get("chat_template"))
    chat = template if options.chat is None else options.chat
    encode, haystack = encoder(trained.tokenizer, chat=chat), read_haystack(options.path)
    make = partial(make_prompt, encode=encode, haystack=haystack)
    for task in tasks:  # before hours of answers
        make(task, length=min(lengths), drawn="")
    command = scored_command(settings, "ruler")
    places = [(length, task) for length in lengths for task in tasks]
    own = settings.checkpoint is not None
    parent = trained.folder if own else Path(settings.output) / trained.folder.name
    what = {"step": trained.step, "identity": _identity(trained, uses(trained.settings))}
    folder, rows = _unfinished(parent, command, what, len(places))
    for length, task in places[len(rows) :]:
        began = time.monotonic()
        samples = options.samples if length <= 32_768 else options.samples_beyond_32k
        drawn = [f"{settings.seed} {number}" for number in range(samples)]
        made = [make(task, length=length, drawn=one) for one in drawn]
        prompts = [tokens for tokens, _ in made]
        answers = _answers(trained, hardware, prompts, TASKS[task][1], chat=chat)
        row: Row = {"model": settings.named(settings.model.label), **what}
        row |= {"length": length, "task": task, "samples": samples}
        row["prompts"] = hashlib.sha256(repr(prompts).encode()).hexdigest()[:16]
        scores = []
        with (folder / "answers.jsonl").open("a", encoding="utf-8") as file:
            for text, (_, expected) in zip(answers, made, strict=True):
                line = {"length": length, "task": task, "expected": expected, "answer": text}
                file.write(json.dumps(line) + "\n")
                scores.append(f"{score(text, expected):g}")
        row |= {"scores": " ".join(scores), "minutes": round((time.monotonic() - began) / 60, 3)}
        rows.append(scored(row))
        write_result(folder / RESULT, settings.recipe, command, rows)
        ends = " ({score_low:.1f} to {score_high:.1f})" if samples > 1 else ""
        found = f"{{score:.1f}}{ends}, {{minutes:.1f}} minutes".format(**rows[-1])
        say(f"{task} at {length:,} tokens: {found}")
    rows += mean_rows(rows)
    write_result(folder / RESULT, settings.recipe, command, rows)
    say(f"{trained.checkpoint} (step {trained.step}): scores of 0 to 100 by length")
    View(["task"], pivot="length", value="score").table(rows).print()
    say(f"the rows are in {folder / RESULT}, drawn in {ruler_figure(rows, folder / 'ruler.png')}")
    return rows


def _answers(
    trained: TrainedModel, hardware: Hardware, prompts: list[list[int]], count: int, *, chat: bool
) -> list[str]:
    """What the model writes after each prompt: its likeliest tokens, `count` at most."""
    model, tokenizer = trained.model, trained.tokenizer
    dtype, mask = AUTOCAST.get(hardware.precision), trained.settings.applied_mask
    how: dict[str, Any] = {"end_of_text": generation_ends(model, tokenizer, chat=chat)}
    how |= {"temperature": 0, "mask": make_mask(mask, packed=False)}
    with torch.autocast(hardware.kind, dtype=dtype, enabled=dtype is not None):
        found = generate(model, prompts, count, **how)
    return [tokenizer.decode(one[len(at) :]) for one, at in zip(found, prompts, strict=True)]


def _identity(trained: TrainedModel, used: Iterable[str]) -> str:
    """A hash of the trained weights, and of the used settings in the checkpoint's stage."""
    found = [reduce(getattr, name.split("."), trained.settings) for name in used]
    digest = hashlib.sha256(repr(found).encode())
    for name, one in trained.model.state_dict().items():
        digest.update(name.encode())
        digest.update(one.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _unfinished(parent: Path, command: str, what: Row, places: int) -> tuple[Path, list[Row]]:
    """The folder and rows that this command has begun with the same model; else a new folder."""
    for path in parent.glob(f"ruler*/{RESULT}"):
        found = read_result(path)
        same = found.command == command and all(what.items() <= row.items() for row in found.rows)
        if same and len(found.rows) < places:
            say(f"{path} has {len(found.rows)} of {places} rows: it is gone on with")
            return path.parent, found.rows
    return make_unique(parent, "ruler"), []


def ruler_figure(rows: Rows, path: str | Path) -> Path:
    """Draw the scores, 0 to 100, by task and length as a PNG, with a panel for each model."""
    keys = "model", "task", "length"
    models, tasks, lengths = (list(dict.fromkeys(one[key] for one in rows)) for key in keys)
    figure = new_figure(1.2 + 0.32 * len(tasks), "RULER: score by task and length", rows)
    for at, model in enumerate(models, start=1):
        panel = figure.add_subplot(1, len(models), at)
        style(panel, str(model))
        found = {
            (one["task"], one["length"]): one["score"] for one in rows if one["model"] == model
        }
        grid = [[found.get((task, length), float("nan")) for length in lengths] for task in tasks]
        panel.imshow(grid, cmap="YlGn", vmin=0, vmax=100, aspect="auto")
        panel.grid(visible=False)
        panel.set_xticks(range(len(lengths)), map(tokens_label, lengths))
        panel.set_yticks(range(len(tasks)), tasks if at == 1 else [""] * len(tasks))
        for (task, length), mean in found.items():
            where = lengths.index(length), tasks.index(task)
            look = "white" if mean > 75 else INK
            panel.text(*where, f"{mean:.0f}", ha="center", va="center", fontsize=9, color=look)
    return save(figure, Path(path))
