"""The pixels of the task's own program, each of them, on any device."""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import partial

import numpy as np
import original_program as program
import pytest
import torch
from image_sets import ImagesOf, drawn, margins

from flashtrain_recipes.arena.pathfinder import raster
from flashtrain_recipes.arena.pathfinder.parameters import PathfinderParameters, of_side
from flashtrain_recipes.arena.pathfinder.raster import rasterise
from flashtrain_recipes.arena.pathfinder.store import PathfinderImages
from flashtrain_recipes.arena.pathfinder.windows import (
    DEGREES,
    dash_windows,
    directions,
    disc_windows,
    mask_windows,
    turned_back,
)

SIDES = (32, 64, 128, 256)
PINNED = [
    620460126,
    560388047,
    3767524618,
    69275397,
    2734351838,
    3588532586,
    2406717008,
    2234489019,
]


def drawn_angles(parameters: PathfinderParameters, margin: int) -> np.ndarray:
    """Of each direction, the angle that its dash is drawn in: a curve's first forwards,
    every other backwards."""
    angles = directions(parameters, margin)
    return np.concatenate([angles[:DEGREES], turned_back(angles[DEGREES:])])


def choices(
    images: PathfinderImages, number: int
) -> tuple[list[tuple[program.Place, float]], list[program.Place]]:
    """An image's dashes, each where it starts and its angle, and its markers."""
    parameters, margin = images.parameters, int(margins(images)[number])
    strokes = images.strokes([number])
    before = 1 + sum(
        len(directions(parameters, other)) for other in parameters.margins if other < margin
    )
    angles, shapes = (
        drawn_angles(parameters, margin),
        sum(len(directions(parameters, m)) for m in parameters.margins),
    )
    windows = strokes["windows"][0][strokes["windows"][0, :, 2] > 0].tolist()
    dashes = [((y, x), float(angles[(shape - 1) % shapes + 1 - before])) for x, y, shape in windows]
    return dashes, [(int(y), int(x)) for x, y in strokes["markers"][0].tolist()]


def test_a_dash_in_each_direction_and_what_it_keeps_free_are_what_published_weights_saw() -> None:
    """Pillow draws and reduces them: a release that does so otherwise would change
    all images in silence."""
    drawn = [
        make(of_side(side), of_side(side).margins[-1])
        for side in SIDES
        for make in (dash_windows, mask_windows)
    ]
    assert [zlib.crc32(windows.tobytes()) for windows in drawn] == PINNED


@pytest.mark.parametrize(("side", "radius"), [(32, 1.5), (64, 2.5), (64, 3.0), (96, 5.0)])
def test_a_disc_anywhere_has_pillows_pixels_at_the_edges_too(side: int, radius: float) -> None:
    windows = disc_windows(radius)
    reach = windows.shape[-1] // 2
    places = torch.arange(side)
    chosen = raster.disc_place(places, side, len(windows)).tolist()
    for y, x in [
        (0, 0),
        (1, side - 1),
        (2, 5),
        (side - 2, 3),
        (side - 6, side // 2),
        (side // 2, side // 2 + 1),
    ]:
        expected = np.pad(np.rint(program.marker(side, (y, x), radius) * 255), reach)
        found = windows[chosen[y], chosen[x]]
        assert np.array_equal(found, expected[y : y + 2 * reach + 1, x : x + 2 * reach + 1])
        assert found.sum() == expected.sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("side", "contour", "count"),
    [(32, "hard", 40), (64, "easy", 3), (128, "easy", 4), (256, "hard", 3), (48, "3", 5)],
)
def test_whole_images_have_the_programs_pixels(
    images_of: ImagesOf, side: int, contour: str, count: int
) -> None:
    images = images_of(side, contour, count)
    found = drawn(images)
    assert (found.dtype, found.shape) == (torch.uint8, (count, side, side))
    for number in range(count):
        dashes, markers = choices(images, number)
        expected = program.picture(dashes, markers, images.parameters, int(margins(images)[number]))
        assert np.array_equal(found[number].numpy(), expected)


@pytest.mark.slow
def test_dashes_of_long_and_of_short_curves_may_be_brighter_in_each_image_by_itself(
    images_of: ImagesOf,
) -> None:
    images = images_of(64, "easy", 3)
    factors = torch.tensor([[1.0, 1.0], [1.2, 0.8], [0.75, 1.3]])
    found = drawn(images, brightness=factors)
    for number, (of_long, of_short) in enumerate(factors.tolist()):
        parameters = images.parameters
        brighter = replace(
            parameters,
            long_contrast=parameters.long_contrast * of_long,
            short_contrast=parameters.short_contrast * of_short,
        )
        expected = program.picture(*choices(images, number), brighter, int(margins(images)[number]))
        assert np.abs(found[number].numpy().astype(int) - expected).max() <= 1


def test_a_dash_and_a_disc_at_the_edge_are_cut_off() -> None:
    parameters = of_side(32)
    windows = torch.tensor([[[0, 0, 1 + 225], [31, 31, 1 + 40], [9, 9, 0]]], dtype=torch.int32)
    markers = torch.tensor([[[0, 30], [31, 2]]])
    angles = drawn_angles(parameters, 1)
    dashes = [((0, 0), float(angles[225])), ((31, 31), float(angles[40]))]
    expected = program.picture(dashes, [(30, 0), (2, 31)], parameters, 1)
    assert np.array_equal(rasterise(windows, markers, parameters)[0].numpy(), expected)


@pytest.mark.slow
def test_portions_do_not_show(images_of: ImagesOf, monkeypatch: pytest.MonkeyPatch) -> None:
    images = images_of(32, "hard", 40)
    whole = drawn(images)
    monkeypatch.setattr(raster, "PIXEL_CHUNK", 12_000)
    assert torch.equal(drawn(images), whole)
    assert torch.equal(drawn(images, [7, 8]), whole[7:9])
    assert drawn(images, []).shape == (0, 32, 32)


@pytest.mark.slow
def test_all_of_drawing_is_one_graph(images_of: ImagesOf) -> None:
    images = images_of(32, "hard", 40)
    strokes = images.strokes([1, 2, 3])
    tables = raster.drawing_tables(images.parameters, (1.5, 2.0), torch.device("cpu"))
    whole = torch.compile(
        partial(raster.draw, side=32, tables=tables), fullgraph=True, backend="eager"
    )
    assert torch.equal(whole(strokes["windows"], strokes["markers"]), drawn(images, [1, 2, 3]))


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("side", [32, 128, 256])
def test_a_gpu_draws_the_same_to_the_pixel(images_of: ImagesOf, side: int) -> None:
    images = images_of(side, "easy", 20)
    assert torch.equal(drawn(images, device="cuda").cpu(), drawn(images))
