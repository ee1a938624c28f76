"""Sets of images that several tests look at, generated once."""

from __future__ import annotations

from pathlib import Path

import pytest
from image_sets import ImagesOf

from flashtrain_recipes.arena.pathfinder.store import PathfinderImages, ensure


@pytest.fixture(scope="session")
def images_of(tmp_path_factory: pytest.TempPathFactory) -> ImagesOf:
    """images_of(side, contour, count): the first images of seed 7."""
    folder: Path = tmp_path_factory.mktemp("pathfinder")

    def make(side: int, contour: str, count: int) -> PathfinderImages:
        return ensure(side, 7, count, contour=contour, cache_dir=folder)

    return make


@pytest.fixture(autouse=True)
def _caches_of_its_own(cache_home: Path) -> None:
    """Each test here has an empty cache."""
