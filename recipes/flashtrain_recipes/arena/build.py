"""Building a stage's model, data, micro-batches and task from its settings."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from flashtrain.data.sequences import SequenceDataModule, SequenceShape, SequenceSource
from flashtrain.models.activation_checkpointing import MemorySavings
from flashtrain.models.classifier import Classifier
from flashtrain.models.classifier_config import GREY_LEVELS, ClassifierConfig
from flashtrain.settings.settings import Settings, divisors
from flashtrain.tasks import MaskedPixels, SequenceClassification
from flashtrain.tasks.batching import Batching, choose_micro_batch, compiles, encoder_blocks
from flashtrain.tasks.classification import Augment
from flashtrain.tasks.optimization import optimization_options
from flashtrain.training.encoder_memory import PredictingHead, estimate_encoder_memory
from flashtrain.training.hardware import Hardware
from flashtrain.training.memory import MemoryEstimate
from flashtrain.training.validation import held_out_samples
from flashtrain_recipes.arena.augmentations import BY_NAME
from flashtrain_recipes.arena.pathfinder.variation import varied
from flashtrain_recipes.arena.settings import ClassifierSettings
from flashtrain_recipes.arena.stages import Stage

# How each task's images are augmented where sequence.augment does not say.
_OWN_AUGMENTATION = {"pathfinder": "turn", "image": "mirror"}
TASK = "classification"  # what checkpoints and weights files call this task
# settings sequence.* that decide which generated expressions are for testing.
PARTS = ("seed", "train", "validation")


def make_data(
    settings: Settings,
    hardware: Hardware,
    source: SequenceSource,
    *,
    micro_batch: int,
    accumulate: int,
) -> SequenceDataModule:
    """Return the data module of a stage.

    Args:
        micro_batch: samples of a micro-batch on one device.
        accumulate: micro-batches whose gradients are accumulated for a step.
    """
    sequence = settings.sequence
    return SequenceDataModule(
        source,
        micro_batch,
        total_steps=settings.trainer.steps,
        accumulate=accumulate,
        seed=settings.seed,
        validation_samples=held_out_samples(
            sequence.validation_samples, settings.trainer.validate_every, sequence.batch
        ),
        evaluation_batch=sequence.evaluation_batch,
        num_workers=2 if hardware.kind == "cuda" else 0,
    )


def classifier_config(
    settings: ClassifierSettings, shape: SequenceShape, *, predicts: bool = False
) -> ClassifierConfig:
    """Return the configuration of a model for samples of this shape.

    Args:
        predicts: whether a head predicts masked tokens; a model of images always
            has one, for grey levels.

    Raises:
        UserError: the settings do not suit the samples.
    """
    image = shape.side is not None
    return ClassifierConfig(
        classes=shape.classes,
        length=shape.length,
        embed=settings.embed,
        layers=settings.layers,
        heads=settings.heads,
        ffn=settings.ffn or 4 * settings.embed,
        vocab_size=shape.vocab_size,
        inputs=(settings.inputs or "grey") if image else "tokens",
        positions=settings.positions or ("axial" if image else "rotary"),
        side=shape.side,
        pooling=settings.pooling,
        towers=shape.towers,
        dropout=settings.dropout,
        grey_bins=GREY_LEVELS if image else shape.vocab_size if predicts else 0,
        pattern=settings.pattern,
        pattern_block=settings.pattern_block,
        pattern_local=settings.pattern_local,
    )


def trained_config(settings: Settings, shape: SequenceShape) -> ClassifierConfig:
    """Return the configuration of the model that a stage trains, for samples of this shape."""
    return classifier_config(settings.classifier, shape, predicts=settings.masked_pixels.weight > 0)


def pixels_read(settings: Settings, length: int) -> int:
    """Return how many tokens of a sequence of `length` a step trains on:
    sequence.training_pixels of them, or all."""
    return min(settings.sequence.training_pixels or length, length)


def make_classifier(settings: Settings, hardware: Hardware, shape: SequenceShape) -> Classifier:
    """Return a stage's model, with random weights."""
    return Classifier(trained_config(settings, shape), attention=hardware.attention)


def make_task(
    settings: Settings, hardware: Hardware, model: Classifier, description: dict[str, Any]
) -> SequenceClassification:
    """Return the LightningModule that trains the model; checkpoints store
    `description` (describe_stage)."""
    sequence, masked = settings.sequence, settings.masked_pixels
    return SequenceClassification(
        model,
        classification_weight=sequence.classification_weight,
        masked=MaskedPixels(masked.weight, masked.share, masked.copies) if masked.weight else None,
        augment=_augmentations(settings),
        training_pixels=sequence.training_pixels,
        seed=settings.seed,
        cuda_graphs=settings.trainer.cuda_graphs,
        compile=compiles(settings, hardware),
        description=description,
        **optimization_options(settings),
    )


def _augmentations(settings: Settings) -> tuple[Augment, ...]:
    sequence = settings.sequence
    shown = BY_NAME[sequence.augment or _OWN_AUGMENTATION.get(sequence.data, "none")]
    if sequence.data == "pathfinder" and settings.pathfinder.variation:
        return varied(settings.pathfinder.variation), *shown
    return shown


def describe_stage(stage: Stage, model: Classifier) -> dict[str, Any]:
    """Return what checkpoints store about the model and its stage, in plain values."""
    settings = stage.settings
    given = {name: getattr(settings.sequence, name) for name in PARTS}
    parts = {name: value for name, value in given.items() if value is not None}
    return {
        "task": TASK,
        "recipe": settings.recipe,
        "stage": stage.number,
        "data": settings.sequence.data,
        "contour": settings.pathfinder.contour,
        "shape": asdict(model.config),
        **({"sequence": parts} if settings.sequence.data == "listops" else {}),
    }


def choose_stage_batching(settings: Settings, hardware: Hardware, model: Classifier) -> Batching:
    """Return a stage's micro-batch: trainer.micro_batch, else the most samples that fit into the
    GPU's memory (on a CPU: all samples of a step)."""
    share, given = settings.sequence.batch // settings.trainer.ranks, settings.trainer.micro_batch
    config, masked = model.config, settings.masked_pixels
    length = pixels_read(settings, config.length)
    blocks = encoder_blocks(config)
    # Rows that are read a second time with pixels masked, and those that have any.
    again = masked.copies if masked.weight and settings.sequence.classification_weight else 0.0
    hidden = 0.0 if not masked.weight else again or 1.0

    def estimate(size: int, savings: MemorySavings) -> MemoryEstimate:
        rows = size * config.towers
        head = PredictingHead(
            config.grey_bins, max(1, round(hidden * rows * masked.share * length))
        )
        return estimate_encoder_memory(
            model.parameter_count(),
            blocks,
            tokens=round(rows * (1 + again)) * length,
            max_seqlen=length,
            head=head if hidden and config.grey_bins else None,
            precision=hardware.precision,
            savings=savings,
            compiled=compiles(settings, hardware),
            attention=hardware.attention,
            master_weights=settings.optimizer.master_weights,
        )

    return choose_micro_batch(settings, hardware, given or divisors(share), share, estimate)
