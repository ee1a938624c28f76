"""mode=plan of task=classification: what each stage would take, and nothing started."""

from __future__ import annotations

import torch

from flashtrain.classification.batching import choose_stage_batching
from flashtrain.classification.build import make_classifier, make_sequence_source, shape_without_data
from flashtrain.classification.stages import stages_of
from flashtrain.classification.words import describe_stage_line, random_start
from flashtrain.data.sequences.source import SequenceShape
from flashtrain.encoder_batching import memory_plan
from flashtrain.errors import UserError
from flashtrain.plan import duration, expected_rate
from flashtrain.settings import Settings
from flashtrain.training.hardware import Hardware


def plan_classifier(settings: Settings, hardware: Hardware) -> str:
    """Parameters, samples and time of every stage, as lines to print. Builds no weights, makes no data."""
    rate, how = expected_rate(hardware)
    lines, total = [], 0.0
    for stage in stages_of(settings):
        shape, data = _shape(stage.settings)
        with torch.device("meta"):
            model = make_classifier(stage.settings, hardware, shape)
        batching = choose_stage_batching(stage, hardware, model)
        masked = stage.settings.masked_pixels
        # Rows that are read a second time with pixels masked.
        extra = masked.copies if masked.weight and stage.settings.sequence.classification_weight else 0.0
        flops = stage.samples * model.flops_per_sample() * (1 + extra)
        seconds = flops / (rate * settings.trainer.ranks)
        total += seconds
        lines += [
            describe_stage_line(stage, hardware, model, batching),
            f"  {data}",
            f"  {stage.samples:,} samples, {model.flops_per_sample() / 1e12:.3g} TFLOP each: about {duration(seconds)}",
            *(f"  {line}" for line in memory_plan(batching)),
        ]
    hint = random_start(stages_of(settings)[0])
    lines += [hint] if hint else []
    lines.append(f"time: about {duration(total)} in all ({how}), making the data, start-up and validation apart")
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
