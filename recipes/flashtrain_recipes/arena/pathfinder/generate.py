"""Generation of Pathfinder images: each image is the same every time, in any order, by
any number of threads.

The compiled walks release Python's lock, so that threads of one process use all cores. A file grows
in order and may be interrupted at any time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from flashtrain.errors import UserError
from flashtrain_recipes.arena.pathfinder.parameters import PathfinderParameters
from flashtrain_recipes.arena.pathfinder.records import record_type, seal
from flashtrain_recipes.arena.pathfinder.walk_tables import WalkTables, walk_tables

log = logging.getLogger(__name__)

# Raised when the same seed would give other images, or the file's form changes. 1 was
# another program's drawing.
VERSION = 2
HEADER_BYTES = 1024
CHUNK = 256  # images; at side 64, the slowest, some seconds


@dataclass(frozen=True)
class ImageStream:
    """An endless sequence of Pathfinder images: its parameters, seed and split determine
    image number 0, 1, 2, ..."""

    parameters: PathfinderParameters
    seed: int
    split: str

    @property
    def key(self) -> int:
        """A number of 64 bits that differs between streams with different
        seeds, splits or sides."""
        name = f"{VERSION}/{self.seed}/{self.split}/{self.parameters.side}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")

    def header(self) -> bytes:
        """Return the HEADER_BYTES bytes before a file's records: a line of JSON that
        describes the file to a reader."""
        header = {"format": "flashtrain pathfinder", "version": VERSION, **asdict(self)}
        return json.dumps(header).encode().ljust(HEADER_BYTES - 1) + b"\n"


def generate_records(stream: ImageStream, first: int, count: int) -> np.ndarray:
    """Generate `count` images from number `first` on, and return their records, (count,).

    Raises:
        UserError: no curves fit the image, or numba is missing.
    """
    try:
        from flashtrain_recipes.arena.pathfinder import walk
    except ImportError as error:
        raise UserError(
            f"generating Pathfinder images needs numba, which cannot be imported here ({error}): "
            "pip install numba, or carry over a file of images made elsewhere."
        ) from error
    parameters = stream.parameters
    records = np.zeros(count, dtype=record_type(parameters))
    tips = np.zeros((count, parameters.max_dashes, 2), dtype=np.int64)
    directions = np.zeros((count, parameters.max_dashes), dtype=np.uint16)
    facts = np.zeros((count, 5), dtype=np.int64)
    sizes = (
        parameters.side,
        parameters.seed_distance,
        parameters.contour_dashes,
        parameters.distractors,
        parameters.distractor_dashes,
        parameters.padding,
    )
    walk.grow_images(
        np.uint64(stream.key), first, sizes, _tables(parameters), tips, directions, facts
    )
    if not facts[:, 4].all():
        raise UserError(
            f"no two curves of {parameters.contour_dashes} dashes fit an image of side "
            f"{parameters.side} after {walk.MAX_ATTEMPTS:,} attempts: choose an easier "
            "contour, or a larger side."
        )
    records["heads"], records["angles"] = tips, directions
    records["count"], records["label"], records["start"] = facts[:, 0], facts[:, 1], facts[:, 2]
    records["margin"] = np.array(parameters.margins)[facts[:, 3]]
    seal(records)
    return records


@lru_cache(maxsize=8)
def _tables(parameters: PathfinderParameters) -> tuple[WalkTables, ...]:
    return tuple(walk_tables(parameters, margin) for margin in parameters.margins)


def grow_file(path: Path, stream: ImageStream, have: int, want: int) -> None:
    """Append the images number `have` to `want` - 1 to a file; first cut off all that follows
    its first `have` images, which an interrupted command may have left.

    The caller holds the file's lock. Each chunk is flushed to disk before the next is written.

    Raises:
        UserError: no curves fit into the image, or numba is missing.
    """
    starts = range(have, want, CHUNK)
    what = f"generating Pathfinder-{stream.parameters.side} {stream.split} images"
    log.info("%s: %s", what, f"{want - have:,}")
    console = Console(stderr=True)

    def chunk(start: int) -> bytes:
        return generate_records(stream, start, min(CHUNK, want - start)).tobytes()

    with path.open("r+b" if have else "wb") as file:
        if not have:
            file.write(stream.header())
        file.truncate(HEADER_BYTES + have * record_type(stream.parameters).itemsize)
        file.seek(0, os.SEEK_END)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        pool = ThreadPoolExecutor(cores)
        try:
            chunks = pool.map(chunk, starts)
            hidden = not console.is_terminal
            for data in track(
                chunks, what, len(starts), console=console, transient=True, disable=hidden
            ):
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        finally:
            pool.shutdown(cancel_futures=True)
