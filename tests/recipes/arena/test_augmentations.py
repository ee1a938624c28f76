"""The positions in which training images are shown."""

from __future__ import annotations

import torch

from flashtrain_recipes.arena.augmentations import turned_and_mirrored


def test_turning_keeps_the_pixels_and_reaches_all_eight_positions() -> None:
    picture = torch.arange(16, dtype=torch.uint8).expand(400, -1)
    turned = turned_and_mirrored(picture, torch.Generator().manual_seed(0))
    assert len({tuple(row) for row in turned.tolist()}) == 8
    assert torch.equal(turned.sort(dim=1).values, picture)
    square = turned[0].view(4, 4)
    steps = {int(square[0, 1]) - int(square[0, 0]), int(square[1, 0]) - int(square[0, 0])}
    assert {abs(step) for step in steps} == {1, 4}
