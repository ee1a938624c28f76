"""Records of the images of one stream, in any order and by any number of processes: the same image every time.

Only this file and walk.py need numba: stored images are read and drawn without it.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np

from flashtrain.errors import UserError
from flashtrain_recipes.arena.pathfinder.original import tables as original_tables
from flashtrain_recipes.arena.pathfinder.parameters import ORIGINAL, PathfinderParameters
from flashtrain_recipes.arena.pathfinder.records import Header, record_type, seal
from flashtrain_recipes.arena.pathfinder.tables import walk_tables


def stream_key(header: Header) -> int:
    """64 bits that tell one stream of images from another: by seed, split and side."""
    name = f"{header.version}/{header.seed}/{header.split}/{header.parameters.side}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def generate_records(header: Header, first: int, count: int) -> np.ndarray:
    """The records (count,) of images number `first` on. Raises UserError where no curves fit the image, or no numba."""
    try:
        from flashtrain_recipes.arena.pathfinder import walk
        from flashtrain_recipes.arena.pathfinder.original import walk as original_walk
    except ImportError as error:
        raise UserError(
            f"generating Pathfinder images needs numba, which cannot be imported here ({error}): pip install numba, "
            "or carry over a file of images made elsewhere."
        ) from error
    parameters = header.parameters
    records = np.zeros(count, dtype=record_type(parameters))
    heads = np.zeros((count, parameters.most_dashes, 2), dtype=np.int64)
    angles = np.zeros((count, parameters.most_dashes), dtype=np.uint16)
    facts = np.zeros((count, 5), dtype=np.int64)
    sizes: tuple[int, ...] = (
        parameters.side,
        parameters.seed_distance,
        parameters.contour_dashes,
        parameters.distractors,
        parameters.distractor_dashes,
    )
    key, tables = np.uint64(stream_key(header)), _tables(parameters, header.drawing)
    if header.drawing == ORIGINAL:
        original_walk.grow_images(key, first, (*sizes, parameters.padding), tables, heads, angles, facts)
    else:
        walk.grow_images(key, first, sizes, tables, heads, angles, facts)
    if not facts[:, 4].all():
        raise UserError(
            f"no two curves of {parameters.contour_dashes} dashes fit an image of side {parameters.side} after "
            f"{walk.MOST_ATTEMPTS:,} attempts: choose an easier contour, a larger side, or shorter dashes."
        )
    records["heads"], records["angles"] = heads, angles
    records["count"], records["label"], records["start"] = facts[:, 0], facts[:, 1], facts[:, 2]
    records["margin"] = np.array(parameters.margins)[facts[:, 3]]
    seal(records)
    return records


@lru_cache(maxsize=8)
def _tables(parameters: PathfinderParameters, drawing: str) -> tuple[Any, ...]:
    make = original_tables.walk_tables if drawing == ORIGINAL else walk_tables
    return tuple(make(parameters, margin) for margin in parameters.margins)
