"""pathfinder.variation: training images drawn a little differently each time, their
curves where they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from image_sets import ImagesOf, drawn
from torch import Tensor

from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain_recipes.arena.pathfinder.source import Pathfinder
from flashtrain_recipes.arena.pathfinder.variation import MAX_CONTRAST, varied, varied_brightness


@pytest.fixture(scope="module")
def pixels(images_of: ImagesOf) -> Tensor:
    """(40, 1024) uint8."""
    return drawn(images_of(32, "hard", 40)).flatten(1)


def changed(drawn: Tensor, strength: float, seed: int = 0) -> Tensor:
    return varied(strength)(drawn, torch.Generator().manual_seed(seed))


@pytest.mark.slow
def test_half_of_the_images_stay_as_they_are_and_the_others_differ_from_one_another(
    pixels: Tensor,
) -> None:
    many = pixels[:1].expand(400, -1)
    found = changed(many, 1.0)
    same = (found == many).all(dim=1)
    assert 160 < int(same.sum()) < 240
    assert len(found.unique(dim=0)) > 150


@pytest.mark.slow
def test_one_seed_draws_the_same_changes(pixels: Tensor) -> None:
    assert torch.equal(changed(pixels, 1.0, 3), changed(pixels, 1.0, 3))
    assert not torch.equal(changed(pixels, 1.0, 3), changed(pixels, 1.0, 4))


@pytest.mark.slow
def test_shapes_stay_in_their_places(pixels: Tensor) -> None:
    """Everything that is drawn lies within a pixel of where it was, and discs stay white."""
    found = changed(pixels, 1.0).view(-1, 32, 32)
    wide = torch.nn.functional.max_pool2d(pixels.view(-1, 1, 32, 32).float(), 5, 1, 2)[:, 0]
    assert ((found == 0) | (wide > 0)).all()
    assert (found.flatten(1).amax(dim=1) == 255).all()


def test_black_stays_black_and_white_white() -> None:
    plain = torch.zeros(50, 11, 11, dtype=torch.uint8)
    plain[25:, 3:8, 3:8] = 255
    found = changed(plain.flatten(1), 1.0).view(-1, 11, 11)
    assert (found[:25] == 0).all()
    assert (found[25:, 5, 5] == 255).all()
    assert (found[25:, 0] == 0).all()


@pytest.mark.parametrize("given", ["-0.1", "1.5"])
def test_a_strength_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(UserError, match=r"pathfinder\.variation"):
        compose_settings(["recipe=pathx", f"pathfinder.variation={given}"])


def test_half_of_the_images_have_dashes_of_other_brightness_the_same_ones_each_time() -> None:
    found = varied_brightness(1.0, 5, np.arange(1000))
    assert torch.equal(found[300:400], varied_brightness(1.0, 5, np.arange(300, 400)))
    assert 440 < int((found == 1).all(dim=1).sum()) < 560
    assert 1.2 < found.max() <= MAX_CONTRAST
    assert 1 / MAX_CONTRAST <= found.min() < 0.8
    others = found[(found != 1).all(dim=1)]
    assert abs(float(torch.corrcoef(others.T)[0, 1])) < 0.2
    assert not torch.equal(found, varied_brightness(1.0, 6, np.arange(1000)))


@pytest.mark.slow  # numba compiles the walks
def test_only_images_for_training_are_varied(tmp_path) -> None:
    source = Pathfinder(
        24, counts={"train": 40, "validation": 8}, contour="2", variation=1.0, cache_dir=tmp_path
    )
    plain = Pathfinder(24, counts=source.counts, contour="2", cache_dir=tmp_path)
    for split, varies in (("train", True), ("validation", False)):
        batches = [
            one.finish(one.split(split)[list(range(8))])["tokens"] for one in (source, plain)
        ]
        assert torch.equal(*batches) is not varies
