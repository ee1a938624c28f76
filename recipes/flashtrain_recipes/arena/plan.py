"""mode=plan of task=classification: what each stage would take, and nothing started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flashtrain.data.sequences import SequenceShape
from flashtrain.errors import UserError
from flashtrain.settings.settings import Settings
from flashtrain.tasks.batching import memory_plan
from flashtrain.tasks.planning import duration, expected_rate
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.arena.batching import choose_stage_batching
from flashtrain_recipes.arena.build import make_classifier, make_sequence_source, pixels_read, shape_without_data
from flashtrain_recipes.arena.pathfinder.parameters import contour_words, dashes_in
from flashtrain_recipes.arena.stages import Stage, stages_of
from flashtrain_recipes.arena.words import describe_stage_line, random_start


def plan_classifier(settings: Settings, hardware: Hardware) -> str:
    """Parameters, samples and time of every stage, as lines to print. Builds no weights, makes no data.

    Stages that differ in nothing but contours or drawings that grow step by step are told together, and memory where it
    changes.
    """
    rate, how = expected_rate(hardware)
    stages = stages_of(settings)
    lines: list[str] = []
    memory: list[str] = []
    total = 0.0
    for alike in _told_together(stages):
        stage = alike[0]
        drawn_as = stage.settings.pathfinder.drawn_as if len(alike) == 1 else None
        images = replace(stage.settings.pathfinder, contour=_span(alike), drawn_as=drawn_as)
        shape, data = _shape(stage.settings.having(pathfinder=images))
        with torch.device("meta"):
            model = make_classifier(stage.settings, hardware, shape)
        batching = choose_stage_batching(stage, hardware, model)
        masked = stage.settings.masked_pixels
        # Rows that are read a second time with pixels masked.
        extra = masked.copies if masked.weight and stage.settings.sequence.classification_weight else 0.0
        samples = sum(one.samples for one in alike)
        of_sample = model.flops_per_sample(pixels_read(stage.settings, shape.length))
        flops = samples * of_sample * (1 + extra)
        seconds = flops / (rate * settings.trainer.ranks)
        total += seconds
        lines += [
            describe_stage_line(stage, hardware, model, batching, _name(alike)),
            f"  {data}{' for each stage' if len(alike) > 1 else ''}",
            f"  {'at most ' if stage.until is not None else ''}{samples:,} samples, "
            f"{of_sample / 1e12:.3g} TFLOP each: about {duration(seconds)}",
        ]
        before, memory = memory, memory_plan(batching)
        lines += [f"  {line}" for line in memory if memory != before]
    hint = random_start(stages[0])
    lines += [hint] if hint else []
    most = "at most " if any(stage.until is not None for stage in stages) else ""
    lines.append(f"time: {most}about {duration(total)} in all ({how}), making the data, start-up and validation apart")
    lines.append("nothing was started; leave out mode=plan to train.")
    return "\n".join(lines)


def _shape(settings: Settings) -> tuple[SequenceShape, str]:
    """The shape of the samples and the data in a line, also of data that is not there yet. UserError: no such data."""
    try:
        source = make_sequence_source(settings, fixed=True)
    except UserError as error:
        shape = shape_without_data(settings)
        if shape is None:
            raise
        return shape, f"not there yet: {error}"
    return source.shape, source.describe()


def _told_together(stages: Sequence[Stage]) -> list[list[Stage]]:
    """The stages in their order; those that differ in a growing contour or drawing alone, by one step from one to the
    next, in one."""
    found: list[list[Stage]] = []
    for stage in stages:
        last = found[-1] if found else []
        growth = _grows(last[-1], stage) if last else ""
        if growth and (len(last) == 1 or growth == _grows(*last[-2:])):
            last.append(stage)
        else:
            found.append([stage])
    return found


def _grows(one: Stage, other: Stage) -> str:
    """What alone is further in the other stage: "contour" by one dash, or such as "drawn_as by 8"; "" for any other
    difference."""
    before, after = one.settings.pathfinder, other.settings.pathfinder
    alike = other.settings.having(pathfinder=replace(after, contour=before.contour, drawn_as=before.drawn_as))
    if one.until != other.until or one.settings != alike:
        return ""
    if before.drawn_as == after.drawn_as:
        return "contour" if dashes_in(after.contour) == _one_more(before.contour) else ""
    if before.contour != after.contour or before.drawn_as is None:
        return ""
    further = (after.drawn_as or 0) - before.drawn_as
    return f"drawn_as by {further}" if further > 0 else ""


def _one_more(contour: str) -> range | None:
    """The dashes of a contour that is longer by one; None after a range of lengths."""
    dashes = dashes_in(contour)
    return range(dashes[-1] + 1, dashes[-1] + 2) if len(dashes) == 1 else None


def _name(alike: Sequence[Stage]) -> str:
    """A stage's name, or such as "stages 1 to 11 of 14, side 32, contours of 3 to 13 dashes one after another"."""
    first, last = alike[0], alike[-1]
    if len(alike) == 1:
        return first.name
    images = first.settings.pathfinder
    drawn = ""
    if images.drawn_as:
        drawn = f", drawn as at side {images.drawn_as}"
        end = last.settings.pathfinder.drawn_as or 0
        if end != images.drawn_as:
            step = (end - images.drawn_as) // (len(alike) - 1)
            drawn = f", drawn as at sides {images.drawn_as} to {end} in steps of {step},"
    return (
        f"stages {first.number + 1} to {last.number + 1} of {first.count}, side {images.side}, "
        f"{contour_words(_span(alike))}{drawn} one after another"
    )


def _span(alike: Sequence[Stage]) -> str:
    """The contours of several stages as a range; the own one where it is the same in all."""
    first, last = (stage.settings.pathfinder.contour for stage in (alike[0], alike[-1]))
    return first if first == last else f"{dashes_in(first)[0]}-{dashes_in(last)[0]}"
