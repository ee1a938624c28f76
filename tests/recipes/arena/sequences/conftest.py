"""What the tests of sequences share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _caches_of_its_own(cache_home: Path) -> None:
    """Each test here has an empty cache."""
