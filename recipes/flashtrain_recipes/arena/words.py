"""A training of classifiers in words: what is about to be trained, and what a demo trains in its place."""

from __future__ import annotations

from flashtrain.models.classifier import Classifier
from flashtrain.settings.settings import Settings
from flashtrain.tasks.batching import Batching, memory_words
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.arena.pathfinder.parameters import contour_words
from flashtrain_recipes.arena.stages import Stage, stages_of

LARGEST_START = 64  # the side of images above which random weights deserve a word


def describe_stage_line(
    stage: Stage, hardware: Hardware, model: Classifier, batching: Batching, name: str | None = None
) -> str:
    """The line that says what a stage trains, on what, in what portions. name: what to call it, if not by its own."""
    config, settings = model.config, stage.settings
    pattern = "" if config.pattern == "dense" else f", {config.pattern} blocks ({model_density(model):.1%} computed)"
    masked = settings.masked_pixels
    read = settings.sequence.training_pixels
    some = f" ({read:,} of them in training, dark ones left out)" if read and read < config.length else ""
    parts = [
        f"classifier: {model.parameter_count() / 1e6:.2f}M parameters, {config.layers} layers of {config.embed}, "
        f"{config.length:,} tokens{some}, {config.positions} positions, {config.pooling} pooling",
        f"attention {hardware.attention}{pattern}",
    ]
    if masked.weight:
        beside = "beside the labels" if settings.sequence.classification_weight else "alone, without labels"
        parts.append(f"masked {'tokens' if config.inputs == 'tokens' else 'pixels'} {beside}")
    steps = f"{stage.steps:,} steps of {stage.batch} samples"
    if stage.until is not None:
        steps = f"until {stage.until:.0%} of held-out samples are right, at most {steps}"
    constant = "constant " if settings.schedule.name == "constant" else ""
    return (
        f"{name or stage.name}: {', '.join(parts)}; {steps} at {constant}learning rate "
        f"{settings.optimizer.learning_rate:g} on {settings.trainer.ranks} x {hardware.name}, {hardware.precision}, "
        f"micro-batch {batching.micro_batch}{memory_words(batching)}"
    )


def random_start(first: Stage) -> str:
    """What to say where large images are to be learned from random weights; "" where there is nothing to say."""
    side = first.settings.pathfinder.side
    if first.settings.weights is not None or first.settings.sequence.data != "pathfinder" or side <= LARGEST_START:
        return ""
    return (
        f"starting from random weights at side {side}: to start from what was learned of smaller images, "
        "weights=RUN (of recipe=pathx) or weights=FILE.safetensors (what mode=export made of one)."
    )


def model_density(model: Classifier) -> float:
    """The share of the score matrix that is computed."""
    return 1.0 if model.pattern is None else model.pattern.density


def trained_line(settings: Settings) -> str:
    """Model and data in a few words, such as "4 layers of 128 on pathfinder, sides 32, 64, 128"."""
    shape = f"{settings.classifier.layers} layers of {settings.classifier.embed}"
    if settings.sequence.data != "pathfinder":
        return f"{shape} on {settings.sequence.data}"
    stages = stages_of(settings)
    sides = list(dict.fromkeys(str(stage.settings.pathfinder.side) for stage in stages))
    contours = contour_words(stages[-1].settings.pathfinder.contour)
    return f"{shape} on pathfinder, {'side' if len(sides) == 1 else 'sides'} {', '.join(sides)}, {contours}"
