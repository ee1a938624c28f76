"""The settings of task=classification: `classifier`, `sequence`, `masked_pixels`,
`curriculum` and `pathfinder`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from flashtrain.errors import UserError, at_least, between, one_of
from flashtrain.settings.options import of_run, option
from flashtrain.settings.settings import Settings
from flashtrain_recipes.arena.pathfinder.parameters import MIN_SIDE, dashes_in, of_side

# values of sequence.data, the ones among them that are images, and values of sequence.augment
DATA = ("pathfinder", "listops", "text", "retrieval", "image")
IMAGES = ("pathfinder", "image")
AUGMENTATIONS = ("none", "turn", "mirror")
FILES = "pathfinder from sequence.path"
# The data that use a setting sequence.*: elsewhere it would be passed over in silence.
_USED_BY = {
    "path": ("text", "retrieval", "image", FILES),
    "length": ("listops", "text", "retrieval"),
    "augment": (*IMAGES, FILES),
    "training_pixels": (*IMAGES, FILES),
    "train": ("listops",),
    "validation": ("listops", "text", "image", FILES),
    "test": ("listops", FILES),
}

ExportPrecision = Literal["float32", "float16"]


@dataclass
class PathfinderSettings:
    """The generated images of the task Pathfinder: side, difficulty, seed and numbers."""

    # Pixels of an image's side; 32, 64, 128 (Path-X) and 256 (Path-256) are the Long Range Arena's.
    side: int = 32
    # Dashes: hard (14, the Arena's), intermediate (9), easy (6), a number, or a range as "3-6".
    contour: str = "hard"
    # How much the drawing of training images is changed at random, from 0 (not at all) to 1.
    variation: float = 0.0
    seed: int = 0  # seed of the images; those to train, validate and test on are different
    train_images: int = 160_000  # how many images to train on
    validation_images: int = 20_000  # how many images to validate on
    test_images: int = 20_000  # how many images to test on
    cache_dir: str | None = None  # where generated images are saved; null: FLASHTRAIN_CACHE
    preview: int | None = None  # images that recipe=pathfinder-preview draws; null: 24

    def check(self) -> None:
        """Raise UserError for the first invalid setting of this class."""
        at_least("pathfinder.side", self.side, MIN_SIDE)
        of_side(self.side, self.contour)
        between("pathfinder.variation", self.variation, 0, 1)
        at_least("pathfinder.seed", self.seed, 0)
        for name in ("train_images", "validation_images", "test_images", "preview"):
            at_least(f"pathfinder.{name}", getattr(self, name), 1)


@dataclass
class ClassifierSettings:
    """The shape of the classifier's encoder."""

    embed: int = 128  # width of the classifier
    layers: int = 4  # blocks of the classifier
    heads: int = 2  # attention heads of the classifier
    ffn: int | None = None  # width of the feed-forward layers; null: four times embed
    # How positions are encoded; null: axial for images, rotary for others.
    positions: str | None = option(None, Literal["rotary", "axial", "learned"])
    # Of images: a grey level is a number (grey), or one of 256 tokens; null: grey.
    inputs: str | None = option(None, Literal["grey", "tokens"])
    pooling: str = option("max", Literal["mean", "max", "attention"])  # pools a sequence's outputs
    # Probability of dropping embeddings, attention weights and outputs of the classifier's blocks.
    dropout: float = 0.0
    # The blocks that attention computes: dense, butterfly, local-global, or by tiles.
    pattern: str = "dense"
    pattern_block: int = 128  # tokens of a block of the pattern
    # Nearest blocks on each side that attention computes (tiles: in both directions).
    pattern_local: int = 1

    def check(self) -> None:
        for name in ("embed", "layers", "heads", "ffn"):
            at_least(f"classifier.{name}", getattr(self, name), 1)
        between("classifier.dropout", self.dropout, 0.0, 1.0, include_high=False)


@dataclass
class SequenceSettings:
    """What is classified: the task, its files, and how many samples."""

    # The task; the images of pathfinder are set by pathfinder.*.
    data: str = option("pathfinder", DATA)
    # A local folder or file with text, retrieval, image, or images of Pathfinder.
    path: str | None = None
    # A dataset that `datasets` loads; of pathfinder, what tables call the images in path.
    name: str | None = None
    # Cut sequences to so many tokens; null: the task's own; not for images.
    length: int | None = None
    batch: int = 32  # sequences of an optimizer step, over all devices
    classification_weight: float = 1.0  # weight of the labels' loss; 0 pre-trains on masked pixels
    # How training images are changed; null: turn for pathfinder, mirror for image.
    augment: str | None = option(None, AUGMENTATIONS)
    # Pixels of an image read in training, bright ones first; null: all, as in tests.
    training_pixels: int | None = None
    # seed of what is generated or drawn at random, but for the images that pathfinder.seed makes.
    seed: int = 0
    train: int | None = None  # sequences of listops to train on; null: the task's own number
    # validation samples of listops or files; null: the task's own number.
    validation: int | None = None
    # test samples of listops, or of Pathfinder's files; null: the task's own number.
    test: int | None = None
    # Samples that each validation reads; null: chosen by validate_every.
    validation_samples: int | None = None
    # Samples of a batch in validation and tests; null: as in training.
    evaluation_batch: int | None = None

    def check(self) -> None:
        data = FILES if self.data == "pathfinder" and self.path is not None else self.data
        for name, users in _USED_BY.items():
            given = getattr(self, name)
            if given not in (None, "none") and data not in users:
                ours = "side" if name == "length" else f"{name}_images"
                instead = (
                    f"Use pathfinder.{ours}=" if data == "pathfinder" else f"Remove sequence.{name}"
                )
                raise UserError(
                    f"sequence.{name}={given} is used by {', '.join(users)}, not by {data}. "
                    f"{instead}."
                )
        counts = ("training_pixels", "length", "batch", "train", "validation", "test")
        for name in (*counts, "validation_samples", "evaluation_batch"):
            at_least(f"sequence.{name}", getattr(self, name), 1)
        at_least("sequence.classification_weight", self.classification_weight, 0)
        at_least("sequence.seed", self.seed, 0)


@dataclass
class MaskedPixelSettings:
    """A loss of predicting masked pixels, or tokens, in addition to the labels' loss."""

    weight: float = 0.0  # weight of the loss on masked pixels; 0: it is not computed
    share: float = 0.5  # share of an image's pixels that are masked
    # Share of images that are read a second time with pixels masked; 0: all are read once, masked.
    copies: float = 0.5

    def check(self) -> None:
        at_least("masked_pixels.weight", self.weight, 0)
        between("masked_pixels.copies", self.copies, 0.0, 1.0)
        between("masked_pixels.share", self.share, 0, 1, include_low=False, include_high=False)


@dataclass
class StageSettings:
    """One stage of a curriculum, on images of side x side. None means the run's own setting."""

    side: int = of_run("pathfinder.side", 32)  # pixels of an image's side in this stage
    steps: int | None = of_run("trainer.steps")  # the most steps of the stage
    # Accuracy on held-out images at which the stage ends early; null: never.
    stop_at_accuracy: float | None = None
    learning_rate: float | None = of_run("optimizer.learning_rate")
    schedule: str | None = of_run("schedule.name")  # constant suits a stage that ends early
    warmup_steps: int | float | None = of_run("schedule.warmup_steps")
    batch: int | None = of_run("sequence.batch")
    micro_batch: int | None = of_run("trainer.micro_batch")
    images: int | None = of_run("pathfinder.train_images")  # from the first one on
    # 3..14: a stage like this one for each number of dashes.
    contour: str | None = of_run("pathfinder.contour")
    pattern: str | None = of_run("classifier.pattern")
    masked_weight: float | None = of_run("masked_pixels.weight")
    training_pixels: int | None = of_run("sequence.training_pixels")
    validate_every: int | None = of_run("trainer.validate_every")
    compile: bool | None = of_run("trainer.compile")  # false is faster for a short stage

    def each_stage(self) -> list[StageSettings]:
        """Return the stage itself or, if `contour` is a range as "3..14", one such stage for
        each number of dashes."""
        first, grows, last = (self.contour or "").partition("..")
        if grows:
            return [replace(self, contour=str(dashes)) for dashes in dashes_in(f"{first}-{last}")]
        return [self]


@dataclass
class CurriculumSettings:
    """The stages of a training, each of which starts from the best weights of the one before."""

    # Empty: one stage, as the other settings say.
    stages: list[StageSettings] = field(default_factory=list)

    def check(self) -> None:
        for number, stage in enumerate(self.stages):
            where = f"curriculum.stages[{number}].stop_at_accuracy"
            between(where, stage.stop_at_accuracy, 0, 1, include_low=False)


@dataclass
class ClassificationSettings(Settings):
    """The settings of task=classification: classifiers of long sequences."""

    task: str = "classification"
    # The dtype of the file that mode=export writes.
    export_precision: str = option("float32", ExportPrecision)
    pathfinder: PathfinderSettings = field(default_factory=PathfinderSettings)
    classifier: ClassifierSettings = field(default_factory=ClassifierSettings)
    sequence: SequenceSettings = field(default_factory=SequenceSettings)
    masked_pixels: MaskedPixelSettings = field(default_factory=MaskedPixelSettings)
    curriculum: CurriculumSettings = field(default_factory=CurriculumSettings)

    def check(self) -> None:
        super().check()
        inputs, data = self.classifier.inputs, self.sequence.data
        if inputs is not None and data not in IMAGES:
            raise UserError(f"classifier.inputs={inputs} is used by images, not {data}. Remove it.")
        one_of("export_precision", self.export_precision, get_args(ExportPrecision))
