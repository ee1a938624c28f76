"""Pathfinder as sequences of pixels: strokes from disk, drawn on the device that trains, in raster order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from flashtrain.data.pathfinder.drawing import rasterise
from flashtrain.data.pathfinder.parameters import ORIGINAL, contour_words, contours_in, drawn_like, of_side
from flashtrain.data.pathfinder.store import PathfinderImages, ensure
from flashtrain.data.pathfinder.strokes import Strokes, together
from flashtrain.data.sequences.batch import SequenceBatch
from flashtrain.data.sequences.source import SequenceShape


class StrokeBatch(TypedDict):
    """What a loader hands over: images that are not drawn yet."""

    strokes: Strokes


class StrokeSamples:
    """The images of one or several stored sets by number (what flashtrain.data.loader calls Samples).

    Of several sets the numbers go round, so that any run of them has as many of each; the first sets may have one more.
    """

    def __init__(self, *sets: PathfinderImages) -> None:
        self.sets = sets
        self.context = sets[0].parameters.side ** 2
        self._count = sum(map(len, sets))
        self.tokens = self._count * self.context

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, samples: list[int]) -> StrokeBatch:
        if len(self.sets) == 1:
            return StrokeBatch(strokes=self.sets[0].strokes(samples))
        numbers = np.asarray(samples, dtype=np.int64)
        which, image = numbers % len(self.sets), numbers // len(self.sets)
        found = [images.strokes(image[which == place]) for place, images in enumerate(self.sets)]
        order = np.argsort(np.argsort(which, kind="stable"))
        return StrokeBatch(strokes=together(found)[torch.from_numpy(order)])


class Pathfinder:
    """side, contour, drawing, seed, workers, cache_dir: see PathfinderSettings. counts: images of each split. drawn_as:
    another side, whose discs, lines and brightness the images have (None: their own).

    Images are made once and kept as strokes of about 200 bytes; a batch is drawn after it has reached the device.
    """

    def __init__(
        self,
        side: int,
        seed: int = 0,
        *,
        counts: Mapping[str, int],
        contour: str = "hard",
        drawing: str = ORIGINAL,
        drawn_as: int | None = None,
        workers: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.parameters = drawn_like(of_side(side, contour), drawn_as)
        self.side, self.seed, self.contour, self.drawing, self.drawn_as = side, seed, contour, drawing, drawn_as
        self.counts = dict(counts)
        self.workers, self.cache_dir = workers, cache_dir

    @property
    def shape(self) -> SequenceShape:
        return SequenceShape(classes=2, length=self.side**2, side=self.side)

    def describe(self) -> str:
        counts = ", ".join(f"{count:,} {name}" for name, count in self.counts.items())
        what = contour_words(self.contour, self.drawn_as, self.drawing)
        return f"Pathfinder-{self.side}, {what}, seed {self.seed}: {counts} images"

    def prepare(self) -> None:
        """Generate what is missing of every split."""
        for name in self.counts:
            self.split(name)

    def split(self, name: str) -> StrokeSamples:
        """One of "train", "validation", "test"; no image is in two of them."""
        contours, count = contours_in(self.contour), self.counts[name]
        sets = (
            ensure(
                self.side,
                self.seed,
                len(range(place, count, len(contours))),
                split=name,
                contour=contour,
                drawing=self.drawing,
                workers=self.workers,
                cache_dir=self.cache_dir,
            )
            for place, contour in enumerate(contours)
            if place < count
        )
        return StrokeSamples(*sets)

    def finish(self, batch: StrokeBatch) -> SequenceBatch:
        """The images drawn, pixels in raster order: tokens (B, side * side) uint8."""
        pixels: Tensor = rasterise(batch["strokes"], self.parameters, self.drawing, self.drawn_as)
        return SequenceBatch(tokens=pixels.flatten(1), labels=batch["strokes"].labels)
