"""What the data tests share: corpora small enough to check by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


class ListSource:
    """A TextSource of the strings it is given; it counts how often it was read."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        self.readings = 0

    def describe(self) -> str:
        return "a list of texts"

    def fingerprint(self) -> str:
        return repr(self.texts)

    def documents(self) -> Iterator[str]:
        self.readings += 1
        yield from self.texts

    def approximate_bytes(self) -> int | None:
        return sum(map(len, self.texts))


@pytest.fixture
def list_source() -> type[ListSource]:
    return ListSource


@pytest.fixture(autouse=True)
def _caches_of_its_own(cache_home: Path) -> None:
    """Each test here has an empty cache."""
