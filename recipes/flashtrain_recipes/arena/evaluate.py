"""mode=evaluate and mode=export of task=classification: accuracy on test
samples, and weights files."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from flashtrain.announce import say
from flashtrain.command.compose import compose_settings
from flashtrain.data.sequences import SequenceDataModule, SequenceSource
from flashtrain.errors import UserError
from flashtrain.folders.new_folder import make_unique, new_folder
from flashtrain.folders.run_folder import BEST, find_checkpoint
from flashtrain.models.classifier import Classifier
from flashtrain.models.weight_transfer import carry_weights
from flashtrain.report.rows import RESULT, Row, command_line, write_result
from flashtrain.settings.command_line import CommandLine, as_value, quoted
from flashtrain.settings.settings import Settings
from flashtrain.spec import TrainedModel
from flashtrain.tasks.batching import compiles
from flashtrain.training.hardware import Hardware
from flashtrain.training.memory_measure import AUTOCAST
from flashtrain_recipes.arena.accuracy import accuracy_rows, accuracy_table, wilson
from flashtrain_recipes.arena.build import PARTS, classifier_config
from flashtrain_recipes.arena.published import ORIGINAL, papers_task, task_of
from flashtrain_recipes.arena.settings import IMAGES
from flashtrain_recipes.arena.sources import make_sequence_source
from flashtrain_recipes.arena.stages import stages_of
from flashtrain_recipes.arena.weights import (
    SUFFIX,
    SavedClassifier,
    read_classifier,
    read_notes,
    write_classifier,
)


def settings_for_weights(line: CommandLine) -> Settings:
    """Return the settings of mode=evaluate weights=FILE.safetensors, given the command line.

    Where the command line does not set recipe and data, they are those that the file names.

    Raises:
        UserError: the file holds no classifier.
    """
    path = str(line.by_name["weights"].value())
    if not path.endswith(SUFFIX):
        raise UserError(
            f"mode=evaluate with weights={path}: expected a classifier's .safetensors file. "
            "To evaluate a run, use checkpoint=RUN instead of weights."
        )
    notes = read_notes(path)
    data = notes.get("data", "pathfinder")
    taken = {"sequence.data": data, "pathfinder.contour": notes.get("contour", "hard")}
    name, key = ("pathfinder.side", "side") if data in IMAGES else ("sequence.length", "length")
    taken |= {name: notes["shape"].get(key)} | {
        f"sequence.{one}": notes.get("sequence", {}).get(one) for one in PARTS
    }
    taken |= {} if "recipe" in line.by_name else {"recipe": notes.get("recipe", "pathx")}
    # In quotes: what a file says is a value, and neither a word of the command line nor
    # the name of a variable.
    own = [f"{name}={quoted(str(value))}" for name, value in taken.items() if value is not None]
    settings = compose_settings([*own, *line])
    settings.task = "classification"
    return settings


def of_last_stage(settings: Settings, checkpoint: Path) -> Settings:
    """Return a run's settings with the side and contour of its last stage."""
    last = stages_of(settings)[-1].settings.pathfinder
    return settings.having(
        pathfinder=replace(settings.pathfinder, side=last.side, contour=last.contour)
    )


def run_classifier_mode(settings: Settings, hardware: Hardware) -> dict[str, Any]:
    """Run mode=evaluate or mode=export, and return the summary row."""
    if settings.mode == "evaluate":
        return evaluate_classifier(settings, hardware)
    return _export(settings)


def evaluate_classifier(settings: Settings, hardware: Hardware) -> Row:
    """Measure the accuracy on the settings' test samples, print and save it, and return its row.

    A model trained on images of another side than pathfinder.side is tested as it is,
    since no weight depends on the side.
    """
    saved, folder = _saved(settings)
    source = make_sequence_source(settings, fixed=compiles(settings, hardware), splits=("test",))
    source.prepare()
    say(source.describe())
    model = _model(saved, settings, hardware, source)
    began = time.monotonic()
    right, total = _count_right(model, source, settings, hardware)
    low, high = wilson(right, total)
    drawn = settings.sequence.data == "pathfinder" and settings.sequence.path is None
    row: Row = {
        "implementation": "flashtrain",
        "task": settings.sequence.data,
        **_images(settings),
        "length": source.shape.length,
        "seed": settings.pathfinder.seed if drawn else settings.sequence.seed,
        "samples": total,
        "accuracy": round(right / total, 5),
        "accuracy_low": round(low, 5),
        "accuracy_high": round(high, 5),
        "parameters": model.parameter_count(),
        "weights": saved.path.name,
        "seconds": round(time.monotonic() - began, 1),
    }
    target = make_unique(folder, "evaluate")
    write_result(target / RESULT, settings.recipe, _command(settings), [row])
    say(
        f"{saved.path}: accuracy {row['accuracy']:.2%} on {total:,} test samples of seed "
        f"{row['seed']} (95% interval {low:.2%} to {high:.2%}), {row['seconds']:.0f} s"
    )
    say(f"  the result's rows are in {target / RESULT}")
    if any(other["implementation"].endswith("(paper)") for other in accuracy_rows([row])):
        accuracy_table([row]).print()
    elif theirs := papers_task(task_of(row)):
        say(f"  {task_of(row)}: not comparable with the papers' accuracies, since {theirs}")
    return row


def _images(settings: Settings) -> Row:
    images, sequence = settings.pathfinder, settings.sequence
    if sequence.data != "pathfinder":
        return {"side": None, "contour": None}
    drawn_by = ORIGINAL if sequence.path is None else sequence.name or Path(sequence.path).stem
    return {"side": images.side, "contour": images.contour, "images": drawn_by}


@torch.no_grad()
def _count_right(
    model: Classifier, source: SequenceSource, settings: Settings, hardware: Hardware
) -> tuple[int, int]:
    """Return (how many test samples are classified correctly, how many there are), computed in
    the precision that the model is trained in on this machine."""
    device = next(model.parameters()).device
    data = SequenceDataModule(source, settings.sequence.evaluation_batch or settings.sequence.batch)
    dtype = AUTOCAST.get(hardware.precision)
    forward = torch.compile(model, dynamic=False) if compiles(settings, hardware) else model
    right = torch.zeros((), dtype=torch.int64, device=device)
    console = Console(stderr=True)
    loader, total = data.test_dataloader(), 0
    for loaded in track(
        loader, "evaluating", console=console, transient=True, disable=not console.is_terminal
    ):
        batch = data.on_after_batch_transfer(
            {name: value.to(device) for name, value in loaded.items()}, 0
        )
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            logits = forward(batch["tokens"], batch.get("lengths"))
        right += (logits.argmax(dim=1) == batch["labels"]).sum()
        total += len(logits)
    return int(right), total


def _saved(settings: Settings) -> tuple[SavedClassifier, Path]:
    """Return the weights to evaluate, and the folder for results: that of the run, or for
    weights=FILE the folder of the recipe in `output`."""
    if settings.checkpoint is not None:
        folder, path = find_checkpoint(settings.checkpoint, prefer=BEST)
        return read_classifier(path), folder
    return read_classifier(str(settings.weights)), Path(settings.output) / settings.recipe


def _model(
    saved: SavedClassifier, settings: Settings, hardware: Hardware, source: SequenceSource
) -> Classifier:
    config = saved.config
    shape = source.shape
    if shape.side is not None and shape.side != config.side:
        config = replace(config, length=shape.length, side=shape.side)
        say(
            f"note: weights of images of side {saved.config.side} are tested on images "
            f"of side {shape.side}."
        )
    expected = classifier_config(settings.classifier, shape)
    if (config.classes, config.towers) != (expected.classes, expected.towers):
        raise UserError(
            f"{saved.path} distinguishes {config.classes} classes, and "
            f"sequence.data={settings.sequence.data} has {expected.classes}, or only one of them "
            "is of pairs of texts. Set sequence.data to the task that the model was trained on."
        )
    model = Classifier(config, attention=hardware.attention)
    carry_weights(model, saved.config, saved.state)
    return model.to(hardware.kind).eval()


def _export(settings: Settings) -> dict[str, Any]:
    saved, folder = _saved(settings)
    with new_folder(folder, "export") as (made, exported):
        written = write_classifier(
            saved, made / f"classifier{SUFFIX}", precision=settings.export_precision
        )
        target, size = exported / written.name, written.stat().st_size / 1e6
    say(
        f"exported step {saved.notes['step']} to {target} ({size:.1f} MB, "
        f"{settings.export_precision})"
    )
    say(f"  test it: python -m flashtrain mode=evaluate weights={target}")
    return {"folder": target.parent}


def load_classifier(settings: Settings, hardware: Hardware) -> TrainedModel:
    """Return the classifier of settings.checkpoint, ready to evaluate."""
    saved, folder = _saved(settings)
    model = Classifier(saved.config, attention=hardware.attention)
    model.load_state_dict(saved.state)
    return TrainedModel(
        model.to(hardware.kind).eval(), None, settings, folder, saved.path, saved.notes["step"]
    )


def _command(settings: Settings) -> str:
    given = f"weights={settings.weights}"
    if settings.checkpoint:
        given = f"checkpoint={settings.checkpoint}"
    words = ["mode=evaluate", given, f"sequence.data={settings.sequence.data}"]
    images = settings.pathfinder
    if settings.sequence.path is not None:
        of_files = {
            name: getattr(settings.sequence, name) for name in ("path", "name", "test", "seed")
        }
        words += [
            f"sequence.{name}={given if isinstance(given, int) else as_value(given)}"
            for name, given in of_files.items()
            if given is not None
        ]
        words += (
            [f"pathfinder.side={images.side}"] if settings.sequence.data == "pathfinder" else []
        )
    elif settings.sequence.data == "pathfinder":
        names = ("side", "contour", "seed", "test_images")
        words += [f"pathfinder.{name}={getattr(images, name)}" for name in names]
    return command_line(words)
