"""Generated Pathfinder images on disk: each set is a file in the cache folder, whose name has the
side, contour, seed and split that decide its images.

The file can be copied to another machine: reading and drawing need no numba.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.files.caches import default_cache_dir, only_writer
from flashtrain_recipes.arena.pathfinder.generate import (
    HEADER_BYTES,
    VERSION,
    ImageStream,
    grow_file,
)
from flashtrain_recipes.arena.pathfinder.parameters import (
    PathfinderParameters,
    contours_in,
    of_side,
)
from flashtrain_recipes.arena.pathfinder.records import Strokes, record_type, sound
from flashtrain_recipes.arena.pathfinder.windows import directions


class PathfinderImages:
    """The first `count` images in a file of generated images.

    Args:
        path: the file.
        stream: the sequence of images that the file was generated from.

    Raises:
        UserError: the file holds fewer than `count` complete images.
    """

    def __init__(self, path: Path, stream: ImageStream, count: int) -> None:
        self.path, self.stream, self.parameters = path, stream, stream.parameters
        records, whole = _read(path, self.parameters)
        if whole < count:
            raise UserError(
                f"{path} holds {whole:,} whole images, and {count:,} were requested: request "
                "fewer, or generate the others with numba installed."
            )
        self._records = records[:count]

    def __len__(self) -> int:
        return len(self._records)

    @property
    def labels(self) -> np.ndarray:
        """1 where one long curve joins an image's two discs, else 0, (images,) uint8."""
        return np.array(self._records["label"])

    def strokes(self, indices: Sequence[int] | np.ndarray | Tensor | slice) -> Strokes:
        """Return the images of these numbers, in this order, as strokes."""
        chosen = indices if isinstance(indices, slice) else np.asarray(indices, dtype=np.int64)
        return strokes_of(np.array(self._records[chosen]), self.parameters)


def ensure(
    side: int,
    seed: int,
    count: int,
    *,
    split: str = "train",
    contour: str = "hard",
    cache_dir: str | os.PathLike[str] | None = None,
) -> PathfinderImages:
    """Return the first `count` images of a set, generating those that its file does not hold yet.

    Equal side, contour, seed and split give the same images everywhere; splits share no image. One
    process generates, and others that call this at the same time wait for it.

    Args:
        cache_dir: where sets are saved; None: FLASHTRAIN_CACHE.

    Raises:
        UserError: a setting is invalid, images must be generated and numba is missing, or
            the folder cannot be written.
    """
    stream = ImageStream(of_side(side, contour), seed, split)
    one, *more = contours_in(contour)
    if more:
        raise UserError(
            f"pathfinder.contour={contour} is a range of dashes, and a set of images has curves "
            "of one length: expected one number of dashes."
        )
    base = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    path = base / f"pathfinder{side}-{one}-seed{seed}-{split}-v{VERSION}.bin"
    if _whole(path, stream.parameters) < count:
        with only_writer(path, "pathfinder.cache_dir"):
            have = _whole(path, stream.parameters)
            if have < count:
                grow_file(path, stream, have, count)
    return PathfinderImages(path, stream, count)


def strokes_of(records: np.ndarray, parameters: PathfinderParameters) -> Strokes:
    """Return the images of the records as strokes, in tensors."""
    tips, shapes = records["heads"].astype(np.int32), records["angles"].astype(np.int32)
    # The table of windows: an empty one, each margin's directions, and all of them again at the
    # short curves' contrast.
    before = np.cumsum([1, *(len(directions(parameters, margin)) for margin in parameters.margins)])
    shapes += before[np.searchsorted(parameters.margins, records["margin"])][:, None]
    shapes[:, 2 * parameters.contour_dashes :] += before[-1] - 1
    windows = np.concatenate([tips, shapes[..., None]], axis=-1, dtype=np.int32)
    windows[np.arange(windows.shape[1]) >= records["count"].astype(np.int64)[:, None]] = 0
    # A curve's first dash starts from its tail, every other from its head: the marked tips
    # are where dashes start.
    image, dashes = np.arange(len(records)), parameters.contour_dashes
    start, label = records["start"].astype(np.int64), records["label"].astype(np.int64)
    end = np.where(label == 1, start, 1 - start)  # the curve whose last tip is marked
    markers = np.stack(
        [tips[image, start * dashes], tips[image, end * dashes + dashes - 1]], axis=1
    )
    return Strokes(
        windows=torch.from_numpy(windows),
        markers=torch.from_numpy(markers),
        labels=torch.from_numpy(label),
    )


def _read(path: Path, parameters: PathfinderParameters) -> tuple[np.ndarray, int]:
    kind = record_type(parameters)
    count = max(0, path.stat().st_size - HEADER_BYTES) // kind.itemsize
    if not count:
        return np.zeros(0, dtype=kind), 0
    records = np.memmap(path, dtype=kind, mode="r", offset=HEADER_BYTES, shape=(count,))
    return records, sound(records)


def _whole(path: Path, parameters: PathfinderParameters) -> int:
    return _read(path, parameters)[1] if path.exists() else 0
