"""Tiles for releases of Triton with which those of dispatch.py's table would spill registers.

Each release brings another compiler, which may want more registers for the same kernel: a few instructions more than a
tile leaves, that would spill. Here stand the nearest tiles that spill nothing, found by compiling ahead of time
(tests/kernels/compile_cases.py). Nothing here was timed.
"""

import importlib.metadata
from functools import cache
from typing import Any

Key = tuple[str, int, int]  # (architecture, bits of the dtype, head dimension up to), as in the table
# release -> key -> kind of call ("plain": any) -> what to replace: tiles, as dispatch.Tile has them.
OLDEST: dict[Key, dict[str, dict[str, Any]]] = {
    ("sm_90", 16, 64): {
        "scattered": {"dkdv": (32, 64, 4, 3)},
    },
    ("sm_90", 16, 128): {
        "permuted": {"forward": (64, 64, 8, 3)},
    },
    ("sm_100", 16, 64): {
        "rich": {"dq": (64, 64, 8, 2)},
    },
    ("sm_100", 16, 128): {
        "plain": {"dq": (128, 64, 8, 2, 255)},
        "rich": {"forward": (64, 32, 8, 2, 255)},
    },
    ("sm_80", 16, 64): {
        "grouped": {"dkdv": (32, 128, 8, 1)},
        "rich": {"dkdv": (32, 128, 8, 1)},
    },
    ("sm_80", 16, 128): {
        "rich": {"dkdv": (16, 32, 8, 2)},
    },
}
NEWEST: dict[Key, dict[str, dict[str, Any]]] = {
    ("sm_90", 16, 64): {
        "plain": {"forward": (128, 64, 4, 2), "dkdv": (32, 64, 4, 3)},
        "short": {"forward": (128, 64, 4, 2)},
        "blocks": {"forward": (128, 64, 4, 4)},
        "rich": {"forward": (128, 64, 8, 2, 255)},
    },
    ("sm_90", 16, 128): {
        "intervals": {"forward": (64, 64, 8, 3), "dkdv": (16, 128, 8, 3)},
        "scattered": {"dkdv": (16, 128, 8, 2)},
        "rich": {"forward": (128, 32, 8, 1)},
    },
    ("sm_100", 16, 64): {
        "grouped": {"dkdv": (32, 64, 4, 3, 255)},
        "rich": {"dkdv": (32, 64, 8, 2, 255), "dq": (64, 64, 4, 1)},
    },
    ("sm_80", 16, 64): {
        "scattered": {"dq": (64, 64, 4, 1)},
    },
}


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
