"""mode=plan of task=classification: what each stage would take, and nothing started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flashtrain.classification.batching import choose_stage_batching
from flashtrain.classification.build import make_classifier, make_sequence_source, shape_without_data
from flashtrain.classification.stages import Stage, stages_of
from flashtrain.classification.words import describe_stage_line, random_start
from flashtrain.data.pathfinder.parameters import contour_words, dashes_in
from flashtrain.data.sequences.source import SequenceShape
from flashtrain.encoder_batching import memory_plan
from flashtrain.errors import UserError
from flashtrain.plan import duration, expected_rate
from flashtrain.settings import Settings
from flashtrain.training.hardware import Hardware


def plan_classifier(settings: Settings, hardware: Hardware) -> str:
    """Parameters, samples and time of every stage, as lines to print. Builds no weights, makes no data.

    Stages that differ in nothing but contours that grow dash by dash are told together, and memory where it changes.
    """
    rate, how = expected_rate(hardware)
    stages = stages_of(settings)
    lines: list[str] = []
    memory: list[str] = []
    total = 0.0
    for alike in _told_together(stages):
        stage = alike[0]
        shape, data = _shape(
            replace(stage.settings, pathfinder=replace(stage.settings.pathfinder, contour=_span(alike)))
        )
        with torch.device("meta"):
            model = make_classifier(stage.settings, hardware, shape)
        batching = choose_stage_batching(stage, hardware, model)
        masked = stage.settings.masked_pixels
        # Rows that are read a second time with pixels masked.
        extra = masked.copies if masked.weight and stage.settings.sequence.classification_weight else 0.0
        samples = sum(one.samples for one in alike)
        flops = samples * model.flops_per_sample() * (1 + extra)
        seconds = flops / (rate * settings.trainer.ranks)
        total += seconds
        lines += [
            describe_stage_line(stage, hardware, model, batching, _name(alike)),
            f"  {data}{' for each stage' if len(alike) > 1 else ''}",
            f"  {'at most ' if stage.until is not None else ''}{samples:,} samples, "
            f"{model.flops_per_sample() / 1e12:.3g} TFLOP each: about {duration(seconds)}",
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
    """The stages in their order; those that differ only in the contour, by one dash from one to the next, in one."""
    found: list[list[Stage]] = []
    for stage in stages:
        last = found[-1][-1] if found else None
        if last is not None and _alike(last, stage) and dashes_in(_contour(stage)) == _one_more(_contour(last)):
            found[-1].append(stage)
        else:
            found.append([stage])
    return found


def _alike(one: Stage, other: Stage) -> bool:
    """Whether two stages differ in nothing but the contour."""
    images = replace(other.settings.pathfinder, contour=_contour(one))
    return one.until == other.until and one.settings == replace(other.settings, pathfinder=images)


def _contour(stage: Stage) -> str:
    return stage.settings.pathfinder.contour


def _one_more(contour: str) -> range | None:
    """The dashes of a contour that is longer by one; None after a range of lengths."""
    dashes = dashes_in(contour)
    return range(dashes[-1] + 1, dashes[-1] + 2) if len(dashes) == 1 else None


def _name(alike: Sequence[Stage]) -> str:
    """A stage's name, or such as "stages 1 to 11 of 14, side 32, contours of 3 to 13 dashes one after another"."""
    first, last = alike[0], alike[-1]
    if len(alike) == 1:
        return first.name
    return (
        f"stages {first.number + 1} to {last.number + 1} of {first.count}, side {first.settings.pathfinder.side}, "
        f"{contour_words(_span(alike))} one after another"
    )


def _span(alike: Sequence[Stage]) -> str:
    """The contours of several stages as a range; the own one of a single stage."""
    first, last = _contour(alike[0]), _contour(alike[-1])
    return first if len(alike) == 1 else f"{dashes_in(first)[0]}-{dashes_in(last)[0]}"
