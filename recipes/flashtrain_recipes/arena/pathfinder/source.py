"""Pathfinder as sequences of pixels in raster order: strokes (records.py) are read from disk, and
drawn on the training device."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from flashtrain.data.sequences import SequenceBatch, SequenceShape
from flashtrain_recipes.arena.pathfinder.parameters import contour_words, contours_in, of_side
from flashtrain_recipes.arena.pathfinder.raster import rasterise
from flashtrain_recipes.arena.pathfinder.records import Strokes, together
from flashtrain_recipes.arena.pathfinder.store import PathfinderImages, ensure
from flashtrain_recipes.arena.pathfinder.variation import varied_brightness


class StrokeBatch(Strokes, total=False):
    """A loader's batch of images, as strokes that are not drawn yet."""

    brightness: Tensor  # (B, 2) float32, of training images only: factors for raster.rasterise


class StrokeSamples:
    """The images of one or several stored sets by number, as a dataset
    (flashtrain.data.loader.Samples).

    With several sets, consecutive numbers alternate between them, so that any range has
    as many images of each.

    Args:
        sets: the stored sets, of one side.
        variation: how much the brightness of dashes varies
            (variation.varied_brightness); 0: not at all.
    """

    def __init__(self, *sets: PathfinderImages, variation: float = 0.0) -> None:
        self.sets, self.variation = sets, variation
        self.context = sets[0].parameters.side ** 2
        self._count = sum(map(len, sets))
        self.tokens = self._count * self.context

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, samples: list[int]) -> StrokeBatch:
        numbers = np.asarray(samples, dtype=np.int64)
        strokes = self._strokes(numbers)
        if not self.variation:
            return StrokeBatch(**strokes)
        return StrokeBatch(
            **strokes,
            brightness=varied_brightness(self.variation, self.sets[0].stream.seed, numbers),
        )

    def _strokes(self, numbers: np.ndarray) -> Strokes:
        if len(self.sets) == 1:
            return self.sets[0].strokes(numbers)
        which, image = numbers % len(self.sets), numbers // len(self.sets)
        found = [images.strokes(image[which == place]) for place, images in enumerate(self.sets)]
        order = np.argsort(np.argsort(which, kind="stable"))
        return together(found, torch.from_numpy(order))


class Pathfinder:
    """Generated images as sequences of pixels.

    Images are generated once and saved as strokes of about 200 bytes; a batch is drawn after it
    has reached the device.

    Args:
        side, seed, contour, cache_dir: as in PathfinderSettings.
        counts: {split: number of images}.
        variation: how much the brightness of training images' dashes varies, from 0 to 1.
    """

    def __init__(
        self,
        side: int,
        seed: int = 0,
        *,
        counts: Mapping[str, int],
        contour: str = "hard",
        variation: float = 0.0,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.parameters = of_side(side, contour)
        self.side, self.seed, self.contour = side, seed, contour
        self.variation, self.counts = variation, dict(counts)
        self.cache_dir = cache_dir

    @property
    def shape(self) -> SequenceShape:
        return SequenceShape(classes=2, length=self.side**2, side=self.side)

    def describe(self) -> str:
        counts = ", ".join(f"{count:,} {name}" for name, count in self.counts.items())
        return (
            f"Pathfinder-{self.side}, {contour_words(self.contour)}, seed {self.seed}: "
            f"{counts} images"
        )

    def prepare(self) -> None:
        """Generate the images of all splits that are not stored yet."""
        for name in self.counts:
            self.split(name)

    def split(self, name: str) -> StrokeSamples:
        """Return the images of the split "train", "validation" or "test"; splits share no image."""
        contours, count = contours_in(self.contour), self.counts[name]
        sets = (
            ensure(
                self.side,
                self.seed,
                len(range(place, count, len(contours))),
                split=name,
                contour=contour,
                cache_dir=self.cache_dir,
            )
            for place, contour in enumerate(contours)
            if place < count
        )
        return StrokeSamples(*sets, variation=self.variation if name == "train" else 0.0)

    def finish(self, batch: StrokeBatch) -> SequenceBatch:
        """Draw a batch's images; the tokens are their pixels in raster order,
        (B, side * side) uint8."""
        pixels = rasterise(
            batch["windows"], batch["markers"], self.parameters, batch.get("brightness")
        )
        return SequenceBatch(tokens=pixels.flatten(1), labels=batch["labels"])
