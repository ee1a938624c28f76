"""Which figures an image of a side has, and which are refused."""

from __future__ import annotations

import pytest

from flashtrain.errors import UserError
from flashtrain_recipes.arena.pathfinder.parameters import (
    contour_words,
    contours_in,
    of_side,
)
from flashtrain_recipes.arena.settings import PathfinderSettings

SIDES = (32, 64, 128, 256)


@pytest.mark.parametrize(
    ("contour", "dashes", "short"),
    [
        ("hard", 14, 4),
        ("intermediate", 9, 3),
        ("easy", 6, 2),
        ("5", 5, 1),
        ("2", 2, 1),
        ("3-7", 7, 2),
    ],
)
def test_a_contour_is_a_number_of_dashes(contour: str, dashes: int, short: int) -> None:
    parameters = of_side(64, contour)
    assert (parameters.contour_dashes, parameters.distractor_dashes) == (dashes, short)
    assert parameters.max_dashes == 2 * dashes + 5 * short


def test_a_range_of_contours_has_each_length_once_by_the_name_that_its_images_are_kept_under() -> (
    None
):
    assert contours_in("5-7") == ["5", "easy", "7"]
    assert contours_in("14") == contours_in("hard") == ["hard"]
    assert contour_words("5-7") == "contours of 5 to 7 dashes"


@pytest.mark.parametrize("contour", ["harder", "1", "21", "6-3", "3-", "-3", "3-5-7", "3.5", ""])
def test_a_contour_that_does_not_exist_is_refused_with_what_does(contour: str) -> None:
    with pytest.raises(
        UserError, match="a number of dashes from 2 to 20, a range such as 3-6, easy, hard"
    ):
        of_side(32, contour)


@pytest.mark.parametrize("side", [33, 40, 48, 96, 160, 192, 250])
def test_between_two_known_sides_every_figure_lies_between_theirs(side: int) -> None:
    low = max(known for known in SIDES if known <= side)
    below, found, above = of_side(low), of_side(side), of_side(min(256, 2 * low))
    for name in (
        "padding",
        "seed_distance",
        "marker_radius",
        "dash_length",
        "thickness",
        "long_contrast",
    ):
        ends = sorted([getattr(below, name), getattr(above, name)])
        assert ends[0] - 1e-9 <= getattr(found, name) <= ends[1] + 1e-9, name


@pytest.mark.parametrize("side", [24, 31, 300, 512])
def test_smaller_and_larger_sides_scale_distances_and_keep_dashes(side: int) -> None:
    nearest = of_side(32 if side < 32 else 256)
    found = of_side(side)
    assert found.dash_length == nearest.dash_length
    assert found.seed_distance / side == pytest.approx(
        nearest.seed_distance / nearest.side, rel=0.25
    )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"side": 20}, "pathfinder.side=20 must be at least 24"),
        ({"contour": "hrd"}, "Did you mean 'hard'"),
        ({"train_images": 0}, "pathfinder.train_images"),
        ({"seed": -1}, "pathfinder.seed"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        PathfinderSettings(**settings).check()  # type: ignore[arg-type]
