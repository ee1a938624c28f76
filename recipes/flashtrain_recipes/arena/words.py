"""The texts that a training of classifiers prints: its plan (mode=plan), what each stage
trains, and the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from flashtrain.models.classifier import Classifier
from flashtrain.settings.settings import Settings
from flashtrain.spec import Plan, measured_words, report_finished
from flashtrain.tasks.batching import Batching, memory_words
from flashtrain.tasks.plan_text import last_lines, memory_plan
from flashtrain.training.hardware import Hardware, duration, expected_rate
from flashtrain_recipes.arena.build import choose_stage_batching, make_classifier, pixels_read
from flashtrain_recipes.arena.pathfinder.parameters import contour_words, dashes_in
from flashtrain_recipes.arena.sources import make_sequence_source
from flashtrain_recipes.arena.stages import Stage, stages_of


def trained_columns(settings: Settings) -> dict[str, Any]:
    """Return the columns of summary.json that are known before training: the last stage's
    settings, and the most steps and samples that all stages together make."""
    stages = stages_of(settings)
    last = stages[-1].settings
    image = last.sequence.data == "pathfinder"
    return {
        "model": f"classifier-{settings.classifier.layers}x{settings.classifier.embed}",
        "data": last.sequence.data,
        "side": last.pathfinder.side if image else None,
        "context": last.pathfinder.side**2 if image else last.sequence.length,
        "stages": len(stages),
        "batch": stages[-1].batch,
        "steps": sum(stage.steps for stage in stages),
        "samples": sum(stage.samples for stage in stages),
        "devices": settings.trainer.ranks,
    }


def report_classified(row: dict[str, Any], folder: Path, settings: Settings) -> None:
    """Print a run's results, its folder, and a command to try next."""
    rate, accuracy, loss = (
        row.get(name) for name in ("samples_per_second", "validation_accuracy", "validation_loss")
    )
    what = row["data"] if row.get("side") is None else f"{row['data']}, side {row['side']}"
    labelled = settings.sequence.classification_weight > 0
    found = "" if accuracy is None else f"accuracy {accuracy:.2%} held out, "
    if not labelled:
        found = "" if loss is None else f"loss {loss:.4f} of what is masked, held out, "
    speed = "" if rate is None else f"{rate:,.1f} samples/s{measured_words(row)}, "
    report_finished(
        folder,
        f"finished {row['model']} on {what}: {found}after {row['samples']:,} samples",
        f"{speed}{row['seconds']:.0f} s for the whole command",
        files="summary.json, learning_curve.jsonl",
        then=None if labelled else f"recipe={settings.recipe} weights={folder}",
    )


def describe_stage_line(
    stage: Stage, hardware: Hardware, model: Classifier, batching: Batching, name: str | None = None
) -> str:
    """Return the line that says what a stage trains, on what data.

    Args:
        name: the name to call the stage by; None: its own.
    """
    config, settings = model.config, stage.settings
    blocks = model.pattern
    pattern = "" if blocks is None else f", {config.pattern} blocks ({blocks.density:.1%} computed)"
    masked = settings.masked_pixels
    read = settings.sequence.training_pixels
    some = ""
    if read and read < config.length:
        some = f" ({read:,} of them in training, dark ones left out)"
    parts = [
        f"classifier: {model.parameter_count() / 1e6:.2f}M parameters, {config.layers} layers of "
        f"{config.embed}, {config.length:,} tokens{some}, {config.positions} positions, "
        f"{config.pooling} pooling",
        f"attention {hardware.attention}{pattern}",
    ]
    if masked.weight:
        labels = "alone, without labels"
        if settings.sequence.classification_weight:
            labels = "with the labels"
        parts.append(f"masked {'tokens' if config.inputs == 'tokens' else 'pixels'} {labels}")
    steps = f"{stage.steps:,} steps of {stage.batch} samples"
    if stage.stop_at_accuracy is not None:
        steps = f"until {stage.stop_at_accuracy:.0%} of held-out samples are right, at most {steps}"
    constant = "constant " if settings.schedule.name == "constant" else ""
    return (
        f"{name or stage.name}: {', '.join(parts)}; {steps} at {constant}learning rate "
        f"{settings.optimizer.learning_rate:g} on {settings.trainer.ranks} x {hardware.name}, "
        f"{hardware.precision}, micro-batch {batching.micro_batch}{memory_words(batching)}"
    )


def trained_line(settings: Settings) -> str:
    """Return model and data in a few words, as "4 layers of 128 on pathfinder,
    sides 32, 64, 128"."""
    shape = f"{settings.classifier.layers} layers of {settings.classifier.embed}"
    if settings.sequence.data != "pathfinder":
        return f"{shape} on {settings.sequence.data}"
    stages = stages_of(settings)
    sides = list(dict.fromkeys(str(stage.settings.pathfinder.side) for stage in stages))
    contours = contour_words(stages[-1].settings.pathfinder.contour)
    return (
        f"{shape} on pathfinder, {'side' if len(sides) == 1 else 'sides'} {', '.join(sides)}, "
        f"{contours}"
    )


def plan_classifier(settings: Settings, hardware: Hardware) -> Plan:
    """Return the parameters, samples and estimated time of every stage, as lines to print. No
    weights or data are made.

    An entry of curriculum.stages whose contour is a range, as "3..14", is a stage for each
    contour; these stages share one line.
    """
    rate, how = expected_rate(hardware)
    stages = stages_of(settings)
    lines: list[str] = []
    memory: list[str] = []
    total = 0.0
    for _, of_entry in groupby(stages, key=lambda stage: stage.entry):
        alike = list(of_entry)
        stage = alike[0]
        images = replace(stage.settings.pathfinder, contour=_span(alike))
        source = make_sequence_source(stage.settings.having(pathfinder=images), fixed=True)
        with torch.device("meta"):
            model = make_classifier(stage.settings, hardware, source.shape)
        batching = choose_stage_batching(stage.settings, hardware, model)
        masked = stage.settings.masked_pixels
        # Rows that are read a second time with pixels masked.
        extra = 0.0
        if masked.weight and stage.settings.sequence.classification_weight:
            extra = masked.copies
        samples = sum(one.samples for one in alike)
        of_sample = model.flops_per_sample(pixels_read(stage.settings, source.shape.length))
        flops = samples * of_sample * (1 + extra)
        seconds = flops / (rate * settings.trainer.ranks)
        total += seconds
        lines += [
            describe_stage_line(stage, hardware, model, batching, _name(alike)),
            f"  {source.describe()}{' for each stage' if len(alike) > 1 else ''}",
            f"  {'at most ' if stage.stop_at_accuracy is not None else ''}{samples:,} samples, "
            f"{of_sample / 1e12:.3g} TFLOP each: about {duration(seconds)}",
        ]
        again = partial(choose_stage_batching, hardware=hardware, model=model)
        before = memory
        memory = memory_plan(stage.settings, hardware, batching, again)
        lines += [f"  {line}" for line in memory if memory != before]
    most = "at most " if any(stage.stop_at_accuracy is not None for stage in stages) else ""
    lines.append(
        f"time: {most}about {duration(total)} in all ({how}), making the data, "
        "start-up and validation apart"
    )
    return Plan("\n".join([*lines, *last_lines(settings, hardware)]), total)


def _name(alike: Sequence[Stage]) -> str:
    first, last = alike[0], alike[-1]
    if len(alike) == 1:
        return first.name
    return (
        f"stages {first.number + 1} to {last.number + 1} of {first.count}, side "
        f"{first.settings.pathfinder.side}, {contour_words(_span(alike))} one after another"
    )


def _span(alike: Sequence[Stage]) -> str:
    first, last = (stage.settings.pathfinder.contour for stage in (alike[0], alike[-1]))
    return first if first == last else f"{dashes_in(first)[0]}-{dashes_in(last)[0]}"
