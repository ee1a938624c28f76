"""Generated Pathfinder images on disk: opened as they are, or generated first where some are missing.

A set is one file in the cache folder (FLASHTRAIN_CACHE), named by all that decides its images. It can be carried to
another machine: reading and drawing need neither numba nor the generator.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flashtrain.errors import UserError, at_least, one_of
from flashtrain.files.caches import default_cache_dir, only_writer
from flashtrain_recipes.arena.pathfinder.original.windows import DEGREES, directions
from flashtrain_recipes.arena.pathfinder.parameters import (
    DRAWINGS,
    ORIGINAL,
    PathfinderParameters,
    contours_in,
    of_side,
)
from flashtrain_recipes.arena.pathfinder.records import (
    GENERATOR_VERSIONS,
    HEADER_BYTES,
    Header,
    Strokes,
    read_header,
    record_type,
    sound,
)
from flashtrain_recipes.arena.pathfinder.tables import unit_vectors

SPLITS = ("train", "validation", "test")


class PathfinderImages:
    """A stored set, or its first `count` images.

    Raises UserError where it holds fewer than `count` whole images.
    """

    def __init__(self, path: str | os.PathLike[str], count: int | None = None) -> None:
        self.path = Path(path)
        self.header = read_header(self.path)
        self._records, whole = _read(self.path, self.header)
        if count is not None and whole < count:
            raise UserError(f"{self.path} holds {whole:,} whole images, not {count:,}.")
        self._records = self._records[: whole if count is None else count]

    @property
    def drawing(self) -> str:
        return self.header.drawing

    @property
    def parameters(self) -> PathfinderParameters:
        return self.header.parameters

    def __len__(self) -> int:
        return len(self._records)

    @property
    def labels(self) -> np.ndarray:
        """(len,) uint8: 1 where one long curve joins the two discs."""
        return np.array(self._records["label"])

    @property
    def margins(self) -> np.ndarray:
        """(len,) uint8: the free space around each image's dashes, in pixels."""
        return np.array(self._records["margin"])

    def strokes(self, indices: Sequence[int] | np.ndarray | Tensor | slice) -> Strokes:
        """The images of these numbers, in this order."""
        chosen = indices if isinstance(indices, slice) else np.asarray(indices, dtype=np.int64)
        return strokes_of(np.array(self._records[chosen]), self.parameters, self.drawing)


def ensure(
    side: int,
    seed: int,
    count: int,
    *,
    split: str = "train",
    contour: str = "hard",
    drawing: str = ORIGINAL,
    workers: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> PathfinderImages:
    """The first `count` images of a set, after generating those that its file does not hold yet.

    The same (side, contour, drawing, seed, split) has the same images everywhere, whatever `count` and `workers`;
    splits share none. Processes that ask at one time generate once, the others wait. workers: None is one a core.
    cache_dir: where sets are kept, FLASHTRAIN_CACHE by default.
    Raises UserError: wrong settings, no numba where images are missing, a folder that cannot be written.
    """
    one_of("split", split, SPLITS)
    one_of("drawing", drawing, DRAWINGS)
    at_least("seed", seed, 0)
    at_least("count", count, 1)
    header = Header(of_side(side, contour), seed, split, drawing)
    path = set_path(side, seed, split=split, contour=contour, drawing=drawing, cache_dir=cache_dir)
    if _whole(path) < count:
        _generate(path, header, count, workers)
    return PathfinderImages(path, count)


def set_path(
    side: int,
    seed: int,
    *,
    split: str = "train",
    contour: str = "hard",
    drawing: str = ORIGINAL,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Path:
    """Where the file of a set lies, whether or not it exists yet."""
    one, *more = contours_in(contour)
    if more:
        raise UserError(f"contour={contour} is of several sets of images: here it takes one length.")
    base = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    return base / f"pathfinder{side}-{one}-seed{seed}-{split}-v{GENERATOR_VERSIONS[drawing]}.bin"


def strokes_of(records: np.ndarray, parameters: PathfinderParameters, drawing: str) -> Strokes:
    """The records' images as tensors."""
    count = records["count"].astype(np.int64)
    places = _of_windows if drawing == ORIGINAL else _of_heads
    segments, windows, tips = places(records, parameters)
    past = np.arange(segments.shape[1]) >= count[:, None]
    segments[past], windows[past] = 0, 0
    image, dashes = np.arange(len(records)), parameters.contour_dashes
    start, label = records["start"].astype(np.int64), records["label"].astype(np.int64)
    end = np.where(label == 1, start, 1 - start)  # the curve whose last tip is marked
    first, last = start * dashes, end * dashes + dashes - 1
    markers = np.stack([tips[0][image, first], tips[1][image, last]], axis=1)
    return Strokes(*(torch.from_numpy(values) for values in (segments, windows, count, markers, label)))


Places = tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]  # segments, windows, (tails, heads)


def _of_heads(records: np.ndarray, parameters: PathfinderParameters) -> Places:
    """Of drawing=smooth, where a dash is a head and an angle."""
    heads = records["heads"].astype(np.float32)
    tails = heads - parameters.dash_length * unit_vectors(records["angles"].astype(np.float64)).astype(np.float32)
    windows = np.zeros((*heads.shape[:2], 3), dtype=np.int32)
    return np.concatenate([tails, heads], axis=-1), windows, (tails, heads)


def _of_windows(records: np.ndarray, parameters: PathfinderParameters) -> Places:
    """Of drawing=original, where a dash is the tip that it is drawn from and one of its margin's directions."""
    tips, numbers = records["heads"].astype(np.float32), records["angles"].astype(np.int64)
    tables = [directions(parameters, margin) for margin in parameters.margins]
    before = np.cumsum([1, *map(len, tables)])  # window 0 is empty
    margin = np.searchsorted(parameters.margins, records["margin"])
    angles = np.concatenate([np.zeros(1), *tables])[before[margin][:, None] + numbers]
    along = parameters.dash_length * np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
    begins = (numbers < DEGREES)[..., None]
    tails, heads = np.where(begins, tips, tips - along), np.where(begins, tips + along, tips)
    shapes = before[margin][:, None] + numbers
    # The same windows stand in the table again, at the short curves' contrast.
    shapes[:, 2 * parameters.contour_dashes :] += before[-1] - 1
    windows = np.concatenate([tips, shapes[..., None]], axis=-1).astype(np.int32)
    return np.concatenate([tails, heads], axis=-1), windows, (tails, heads)


def _read(path: Path, header: Header) -> tuple[np.ndarray, int]:
    """The file's records, mapped, and how many of them are whole, from the first."""
    kind = record_type(header.parameters)
    count = max(0, path.stat().st_size - HEADER_BYTES) // kind.itemsize
    if not count:
        return np.zeros(0, dtype=kind), 0
    records = np.memmap(path, dtype=kind, mode="r", offset=HEADER_BYTES, shape=(count,))
    return records, sound(records)


def _whole(path: Path) -> int:
    """How many whole images the file holds; 0 where there is none."""
    if not path.exists() or path.stat().st_size < HEADER_BYTES:
        return 0
    return _read(path, read_header(path))[1]


def _generate(path: Path, header: Header, count: int, workers: int | None) -> None:
    # the generator, which a stored set does not need
    from flashtrain_recipes.arena.pathfinder.generate import grow_file

    with only_writer(path, "pathfinder.cache_dir"):
        have = _whole(path)
        if have < count:
            grow_file(path, header, have, count, workers)
