"""Where dashes lie: as a plain walk by the rules of the task's own program lays them, from
the same random numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from image_sets import ImagesOf, margins
from original_curves import Grown
from test_pathfinder_raster import choices

from flashtrain.errors import UserError
from flashtrain_recipes.arena.pathfinder.generate import VERSION, ImageStream, generate_records
from flashtrain_recipes.arena.pathfinder.parameters import of_side
from flashtrain_recipes.arena.pathfinder.walk_tables import walk_tables

pytestmark = pytest.mark.slow  # numba compiles the walks


@pytest.mark.parametrize(
    ("side", "contour", "count"),
    [(32, "hard", 3), (32, "3", 12), (64, "3", 2), (128, "4", 2), (256, "hard", 1)],
)
def test_an_image_is_the_plain_walks(
    images_of: ImagesOf, side: int, contour: str, count: int
) -> None:
    images = images_of(side, contour, count)
    dashes = images.parameters.contour_dashes
    for number in range(count):
        grown = Grown(images.parameters, images.stream.key, number)
        found, markers = choices(images, number)
        assert [place for place, _ in found] == [place for place, _ in grown.dashes]
        assert np.allclose(
            [angle for _, angle in found], [angle for _, angle in grown.dashes], atol=1e-12
        )
        assert (images.labels[number], margins(images)[number]) == (grown.label, grown.margin)
        end = grown.start if grown.label else 1 - grown.start
        assert markers == [
            grown.dashes[grown.start * dashes][0],
            grown.dashes[end * dashes + dashes - 1][0],
        ]


def test_what_a_dash_keeps_free_beyond_the_edge_occupies_nothing() -> None:
    """Of this image, a distractor lies elsewhere if it does."""
    stream = ImageStream(of_side(48, "easy"), 3, "train")
    record = generate_records(stream, 19, 1)[0]
    grown = Grown(stream.parameters, stream.key, 19)
    assert record["heads"][: record["count"], ::-1].tolist() == [
        list(place) for place, _ in grown.dashes
    ]


@pytest.mark.parametrize(
    ("side", "margin", "possible"), [(32, 1, 30), (64, 1, 95), (128, 2, 354), (128, 3, 360)]
)
def test_only_some_directions_begin_a_curve_at_small_sides(
    side: int, margin: int, possible: int
) -> None:
    """An oddity: where all of a first dash would lie outside for some pixel, the program
    finds no place at all."""
    assert walk_tables(of_side(side), margin).possible.sum() == possible


def test_half_of_the_labels_are_one_and_both_margins_of_path_x_occur(images_of: ImagesOf) -> None:
    labels = images_of(32, "3", 6000).labels
    assert abs(labels.mean() - 0.5) < 4 * 0.5 / len(labels) ** 0.5
    assert set(margins(images_of(128, "4", 30)).tolist()) == {2, 3}


def test_an_image_depends_on_its_number_and_not_on_what_was_made_before() -> None:
    stream = ImageStream(of_side(32), 3, "train")
    together = generate_records(stream, 0, 40)
    apart = np.concatenate(
        [generate_records(stream, first, count) for first, count in ((37, 3), (0, 11), (11, 26))]
    )
    assert np.array_equal(np.roll(apart, -3), together)


def test_seeds_splits_and_sides_have_images_of_their_own() -> None:
    streams = [
        ImageStream(of_side(32), seed, split)
        for seed, split in ((3, "train"), (4, "train"), (3, "test"))
    ]
    made = [generate_records(stream, 0, 50)["heads"] for stream in streams]
    everything = {image.tobytes() for heads in made for image in heads}
    assert len(everything) == 150


def test_these_are_the_images_of_the_generators_version() -> None:
    """A change of the generator that changes images must raise its VERSION,
    and this test with it."""
    record = generate_records(ImageStream(of_side(128), 0, "train"), 1, 1)[0]
    found = (
        record["count"],
        record["label"],
        record["heads"][:3].tolist(),
        record["angles"][:3].tolist(),
    )
    assert (VERSION, *found) == (2, 60, 1, [[42, 83], [56, 87], [65, 87]], [22, 381, 381])


def test_curves_that_cannot_fit_are_reported_in_a_line() -> None:
    straight = replace(of_side(32), continuity=50.0)
    with pytest.raises(UserError, match="no two curves of 14 dashes fit an image of side 32"):
        generate_records(ImageStream(straight, 0, "train"), 0, 100)
