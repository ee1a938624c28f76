"""The label is true to the drawn picture, balanced, and not to be had without following a curve."""

from __future__ import annotations

import numpy as np
import pytest
from image_sets import ImagesOf
from leakage import held_out_accuracy, summary_features
from tracer import traced_label

from flashtrain_recipes.arena.pathfinder.raster import rasterise


@pytest.mark.slow
@pytest.mark.parametrize(("side", "contour", "count"), [(128, "easy", 200), (128, "hard", 200)])
def test_following_the_drawn_curve_finds_the_label(images_of: ImagesOf, side: int, contour: str, count: int) -> None:
    images = images_of(side, contour, count)
    drawn = rasterise(images.strokes(slice(None)), images.parameters).numpy()
    right = np.array([traced_label(image) for image in drawn]) == images.labels
    assert right.mean() >= 0.97
    assert all(right[images.labels == label].mean() >= 0.94 for label in (0, 1))


def test_half_of_the_labels_are_one(images_of: ImagesOf) -> None:
    labels = images_of(32, "hard", 6000).labels
    assert abs(labels.mean() - 0.5) < 4 * 0.5 / len(labels) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("side", "count"), [(32, 6000)])
def test_summary_features_do_not_give_the_label_away(images_of: ImagesOf, side: int, count: int) -> None:
    images = images_of(side, "hard", count)
    assert held_out_accuracy(summary_features(images), images.labels) < 0.55


def test_the_regression_would_find_a_label_that_leaks(images_of: ImagesOf) -> None:
    images = images_of(32, "hard", 2000)
    features = summary_features(images)
    brighter = (features[:, 0] > np.median(features[:, 0])).astype(np.uint8)
    assert held_out_accuracy(features, brighter) > 0.95
