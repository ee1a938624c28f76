"""Pathfinder as sequences of pixels: strokes from disk, drawn on the device that trains, in raster order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypedDict

from torch import Tensor

from flashtrain.data.pathfinder.parameters import of_side
from flashtrain.data.pathfinder.raster import rasterise
from flashtrain.data.pathfinder.store import PathfinderImages, ensure
from flashtrain.data.pathfinder.strokes import Strokes
from flashtrain.data.sequences.batch import SequenceBatch
from flashtrain.data.sequences.source import SequenceShape


class StrokeBatch(TypedDict):
    """What a loader hands over: images that are not drawn yet."""

    strokes: Strokes


class StrokeSamples:
    """A stored set's images by number (what flashtrain.data.loader calls Samples)."""

    def __init__(self, images: PathfinderImages) -> None:
        self.images = images
        self.context = images.parameters.side**2
        self.tokens = len(images) * self.context

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, samples: list[int]) -> StrokeBatch:
        return StrokeBatch(strokes=self.images.strokes(samples))


class Pathfinder:
    """side, contour, seed, workers, cache_dir: see flashtrain.data.pathfinder. counts: images of each split.

    Images are made once and kept as strokes of about 200 bytes; a batch is drawn after it has reached the device.
    """

    def __init__(
        self,
        side: int,
        seed: int = 0,
        *,
        counts: Mapping[str, int],
        contour: str = "hard",
        workers: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.parameters = of_side(side, contour)
        self.side, self.seed, self.contour = side, seed, contour
        self.counts = dict(counts)
        self.workers, self.cache_dir = workers, cache_dir

    @property
    def shape(self) -> SequenceShape:
        return SequenceShape(classes=2, length=self.side**2, side=self.side)

    def describe(self) -> str:
        counts = ", ".join(f"{count:,} {name}" for name, count in self.counts.items())
        return f"Pathfinder-{self.side}, {self.contour} contours, seed {self.seed}: {counts} images"

    def prepare(self) -> None:
        """Generate what is missing of every split."""
        for name in self.counts:
            self.split(name)

    def split(self, name: str) -> StrokeSamples:
        """One of "train", "validation", "test"; no image is in two of them."""
        images = ensure(
            self.side,
            self.seed,
            self.counts[name],
            split=name,
            contour=self.contour,
            workers=self.workers,
            cache_dir=self.cache_dir,
        )
        return StrokeSamples(images)

    def finish(self, batch: StrokeBatch) -> SequenceBatch:
        """The images drawn, pixels in raster order: tokens (B, side * side) uint8."""
        pixels: Tensor = rasterise(batch["strokes"], self.parameters)
        return SequenceBatch(tokens=pixels.flatten(1), labels=batch["strokes"].labels)
