"""Attacks on the command: random settings, mutated files, kills. `python -m tests.attacks` makes them.

Each attack is a generator of rounds, made of a seed and their numbers: attack(scene, seed, count, only).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def _settings(*arguments: Any) -> Iterator[Any]:
    from tests.attacks.settings import rounds

    return rounds(*arguments)


def _files(*arguments: Any) -> Iterator[Any]:
    from tests.attacks.files import rounds

    return rounds(*arguments)


def _kills(*arguments: Any) -> Iterator[Any]:
    from tests.attacks.kills import rounds

    return rounds(*arguments)


ATTACKS: dict[str, Callable[..., Iterator[Any]]] = {"settings": _settings, "files": _files, "kills": _kills}
