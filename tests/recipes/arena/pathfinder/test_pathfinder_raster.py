"""drawing=smooth: the same grey pixels as a slow and plain drawing, on any device, in any portion."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_sets import ImagesOf

from flashtrain_recipes.arena.pathfinder import raster
from flashtrain_recipes.arena.pathfinder.parameters import PathfinderParameters, of_side
from flashtrain_recipes.arena.pathfinder.raster import draw, rasterise
from flashtrain_recipes.arena.pathfinder.records import Strokes


def plain_drawing(strokes: Strokes, image: int, parameters: PathfinderParameters) -> np.ndarray:
    """One image, float64 (side, side) in 0..255: every shape on the whole square, one after the other."""
    fine = (np.arange(2 * parameters.side) + 0.5) / 2 - 0.5
    x, y = np.meshgrid(fine, fine)

    def shape(tail: np.ndarray, head: np.ndarray, radius: float) -> np.ndarray:
        along = head - tail
        share = ((x - tail[0]) * along[0] + (y - tail[1]) * along[1]) / max(along @ along, 1e-6)
        share = share.clip(0, 1)
        distance = np.hypot(x - tail[0] - share * along[0], y - tail[1] - share * along[1])
        points = ((radius - distance) * 2 + 0.5).clip(0, 1)
        return points.reshape(parameters.side, 2, parameters.side, 2).mean(axis=(1, 3))

    canvas = np.zeros((parameters.side, parameters.side))
    for segment in strokes.segments[image, : int(strokes.count[image])].double().numpy():
        dash = shape(segment[:2], segment[2:], parameters.thickness / 2)
        canvas = np.maximum(canvas, dash / dash.max() * parameters.contrast)
    for marker in strokes.markers[image].double().numpy():
        canvas = np.maximum(canvas, shape(marker, marker, parameters.marker_radius))
    return canvas * 255


@settings(max_examples=30, derandomize=True)
@given(
    side=st.integers(24, 80),
    dashes=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 6.3)), min_size=1, max_size=5),
    discs=st.lists(st.floats(0, 1), min_size=4, max_size=4),
)
def test_dashes_and_discs_anywhere_agree_with_a_plain_drawing(
    side: int, dashes: list[tuple[float, float, float]], discs: list[float]
) -> None:
    parameters = of_side(side)
    inset = parameters.dash_length / 2 + 1.5  # dashes lie inside the square, as all that are generated
    middle = inset + torch.tensor([dash[:2] for dash in dashes]) * (side - 1 - 2 * inset)
    half = parameters.dash_length / 2 * torch.tensor([[np.cos(dash[2]), np.sin(dash[2])] for dash in dashes]).float()
    strokes = Strokes(
        segments=torch.cat([middle - half, middle + half], dim=1)[None],
        windows=torch.zeros(1, len(dashes), 3, dtype=torch.int32),
        count=torch.tensor([len(dashes)]),
        markers=(torch.tensor(discs) * (side - 1)).view(1, 2, 2),
        labels=torch.tensor([0]),
    )
    expected = plain_drawing(strokes, 0, parameters)
    assert np.abs(rasterise(strokes, parameters)[0].numpy() - expected).max() <= 0.52


def test_a_known_image_has_known_pixels() -> None:
    parameters = of_side(64)
    strokes = Strokes(
        segments=torch.tensor([[[20.0, 30.0, 25.0, 30.0], [0.0, 0.0, 0.0, 0.0]]]),
        windows=torch.zeros(1, 2, 3, dtype=torch.int32),
        count=torch.tensor([1]),
        markers=torch.tensor([[[50.0, 10.0], [10.0, 50.0]]]),
        labels=torch.tensor([0]),
    )
    drawn = rasterise(strokes, parameters)[0]
    assert drawn[30, 22] == round(0.8 * 255)  # row, column: a dash lies flat, at the contrast of its side
    assert (drawn[10, 50], drawn[50, 10]) == (255, 255)
    assert drawn[0, 0] == 0  # dashes past an image's own are not drawn
    assert drawn[:20, :20].sum() == 0


def test_the_brightest_pixel_of_each_dash_has_the_full_contrast(images_of: ImagesOf) -> None:
    images = images_of(32, "hard", 60)
    strokes = images.strokes(slice(None))
    unmarked = replace(strokes, markers=torch.full_like(strokes.markers, -3.0))
    drawn = rasterise(unmarked, images.parameters)
    assert (drawn.amax(dim=(1, 2)) == round(0.75 * 255)).all()


def test_portions_do_not_show(images_of: ImagesOf, monkeypatch: pytest.MonkeyPatch) -> None:
    images = images_of(32, "hard", 60)
    strokes = images.strokes(slice(None))
    whole = rasterise(strokes, images.parameters)
    monkeypatch.setattr(raster, "POINTS_AT_ONCE", 60_000)
    assert torch.equal(rasterise(strokes, images.parameters), whole)
    assert torch.equal(rasterise(strokes[7:9], images.parameters), whole[7:9])


def test_no_images_are_an_empty_batch(images_of: ImagesOf) -> None:
    images = images_of(32, "hard", 60)
    assert rasterise(images.strokes([]), images.parameters).shape == (0, 32, 32)


def test_all_of_drawing_is_one_graph(images_of: ImagesOf) -> None:
    images = images_of(32, "hard", 60)
    strokes = images.strokes([1, 2, 3])

    def of_tensors(segments: torch.Tensor, count: torch.Tensor, markers: torch.Tensor) -> torch.Tensor:
        return draw(Strokes(segments, strokes.windows, count, markers, count), images.parameters)

    whole = torch.compile(of_tensors, fullgraph=True, backend="eager")
    assert torch.equal(whole(strokes.segments, strokes.count, strokes.markers), rasterise(strokes, images.parameters))


@pytest.mark.gpu
@pytest.mark.parametrize("side", [32, 128, 256])
def test_a_gpu_draws_the_same_but_for_rounding(images_of: ImagesOf, side: int) -> None:
    images = images_of(side, "hard", 60)
    strokes = images.strokes(slice(None))
    here = rasterise(strokes, images.parameters).int()
    there = rasterise(strokes.to("cuda"), images.parameters)
    assert (here - there.cpu().int()).abs().max() <= 1
    assert torch.equal(there, rasterise(strokes.to("cuda"), images.parameters))
