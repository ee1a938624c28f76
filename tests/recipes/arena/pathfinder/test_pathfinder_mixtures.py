"""Images with contours of several lengths in one split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from image_sets import drawn

from flashtrain.errors import UserError
from flashtrain_recipes.arena.pathfinder.source import Pathfinder
from flashtrain_recipes.arena.pathfinder.store import ensure


@pytest.mark.slow  # numba compiles the walks
def test_a_range_has_as_many_images_of_each_length_in_turn(tmp_path: Path) -> None:
    source = Pathfinder(32, 7, counts={"train": 8}, contour="3-5", cache_dir=tmp_path)
    samples = source.split("train")
    assert len(samples) == 8
    batch = source.finish(samples[[7, 0, 3, 1, 2, 4]])
    for row, (contour, number) in enumerate(
        [("4", 2), ("3", 0), ("3", 1), ("4", 0), ("5", 0), ("4", 1)]
    ):
        alone = ensure(32, 7, number + 1, contour=contour, cache_dir=tmp_path)
        assert torch.equal(batch["tokens"][row], drawn(alone, [number]).flatten())
        assert batch["labels"][row] == alone.labels[number]
    assert "contours of 3 to 5 dashes" in source.describe()
    source.counts["train"] = 2  # fewer than lengths: of the first
    assert len(source.split("train")) == 2


def test_one_set_of_images_takes_one_length(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contour=3-5"):
        ensure(32, 7, 2, contour="3-5", cache_dir=tmp_path)
