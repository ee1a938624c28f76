"""Tiles for other releases of Triton than the one that dispatch.py's table was measured with.

Each release brings another compiler, which may want more registers for the same kernel: a few instructions more than a
tile leaves, that would spill. Here stand the nearest tiles that spill nothing, found by compiling ahead of time
(tests/kernels/compile_cases.py). Nothing here was timed.
"""

import importlib.metadata
from functools import cache
from typing import Any

Key = tuple[str, int, int]  # (architecture, bits of the dtype, head dimension up to), as in the table
# release -> key -> kind of call ("plain": any) -> what to replace: tiles, as dispatch.Tile has them.
OLDEST: dict[Key, dict[str, dict[str, Any]]] = {}
NEWEST: dict[Key, dict[str, dict[str, Any]]] = {}


def replacements(key: Key, kind: str) -> dict[str, Any]:
    """What the installed release of Triton needs other than the table's, for a kind of call."""
    installed = release()
    table = OLDEST if installed == (3, 6) else NEWEST if installed >= (3, 9) else {}
    return table.get(key, {}).get(kind, {})


@cache
def release() -> tuple[int, int]:
    """Major and minor number of the installed Triton; (0, 0) where there is none."""
    try:
        numbers = importlib.metadata.version("triton").split(".")
    except importlib.metadata.PackageNotFoundError:
        return 0, 0
    return int(numbers[0]), int(numbers[1])
