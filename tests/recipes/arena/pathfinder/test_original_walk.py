"""drawing=original: the same dashes as a plain walk by the rules of the task's own program, from the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
from image_sets import ImagesOf
from original_curves import Grown
from test_original_drawing import choices

from flashtrain_recipes.arena.pathfinder.generate import generate_records, stream_key
from flashtrain_recipes.arena.pathfinder.original.tables import walk_tables
from flashtrain_recipes.arena.pathfinder.parameters import ORIGINAL, of_side
from flashtrain_recipes.arena.pathfinder.records import Header


@pytest.mark.parametrize(
    ("side", "contour", "count"),
    [(32, "hard", 3), (32, "3", 12), (64, "3", 2), (128, "4", 2), (256, "hard", 1)],
)
def test_an_image_is_the_plain_walks(images_of: ImagesOf, side: int, contour: str, count: int) -> None:
    images = images_of(side, contour, count, ORIGINAL)
    key, dashes = stream_key(images.header), images.parameters.contour_dashes
    for number in range(count):
        grown = Grown(images.parameters, key, number)
        found, markers = choices(images, number)
        assert [place for place, _ in found] == [place for place, _ in grown.dashes]
        assert np.allclose([angle for _, angle in found], [angle for _, angle in grown.dashes], atol=1e-12)
        assert (images.labels[number], images.margins[number]) == (grown.label, grown.margin)
        end = grown.start if grown.label else 1 - grown.start
        assert markers == [grown.dashes[grown.start * dashes][0], grown.dashes[end * dashes + dashes - 1][0]]


def test_what_a_dash_keeps_free_beyond_the_edge_occupies_nothing() -> None:
    """Of this image, a distractor lies elsewhere if it does."""
    header = Header(of_side(48, "easy"), 3, "train")
    record = generate_records(header, 19, 1)[0]
    grown = Grown(header.parameters, stream_key(header), 19)
    assert record["heads"][: record["count"], ::-1].tolist() == [list(place) for place, _ in grown.dashes]


@pytest.mark.parametrize(("side", "margin", "possible"), [(32, 1, 30), (64, 1, 95), (128, 2, 354), (128, 3, 360)])
def test_only_some_directions_begin_a_curve_at_small_sides(side: int, margin: int, possible: int) -> None:
    """An oddity: where all of a first dash would lie outside for some pixel, the program finds no place at all."""
    assert walk_tables(of_side(side), margin).possible.sum() == possible
