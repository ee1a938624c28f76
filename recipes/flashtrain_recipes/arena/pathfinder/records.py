"""The two forms of Pathfinder images that are not drawn yet: records of fixed size on disk, and
strokes, a batch in tensors.

A record ends with a checksum, so that a record that a crash left half written is recognised.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flashtrain_recipes.arena.pathfinder.parameters import PathfinderParameters


class Strokes(TypedDict):
    """A batch of B images with at most N dashes; positions are (x, y) in pixels. The long
    curves' dashes come first."""

    # (B, N, 3) int32: where each dash's window lies, and its number in the table of
    # windows (raster), 0: none
    windows: Tensor
    markers: Tensor  # (B, 2, 2) int32: the centres of the two discs
    labels: Tensor  # (B,) int64: 1 where one long curve joins the discs


def together(parts: Sequence[Strokes], order: Tensor) -> Strokes:
    """Join batches of images, which may differ in their number N of dashes; return the
    images in the given order."""
    most = max(part["windows"].shape[1] for part in parts)
    windows = [F.pad(part["windows"], (0, 0, 0, most - part["windows"].shape[1])) for part in parts]
    markers, labels = (
        torch.cat([part[name] for part in parts])[order] for name in ("markers", "labels")
    )
    return Strokes(windows=torch.cat(windows)[order], markers=markers, labels=labels)


def record_type(parameters: PathfinderParameters) -> np.dtype[np.void]:
    """Return the numpy type of one image's record: its dashes, their number, the label, the
    marked curve, the margin and the checksum."""
    dashes = parameters.max_dashes
    return np.dtype(
        [
            ("angles", "<u2", (dashes,)),  # numbers of directions (windows.directions)
            # Tips (x, y) that dashes are drawn from.
            ("heads", "u1" if parameters.side <= 256 else "<u2", (dashes, 2)),
            ("count", "u1"),
            ("label", "u1"),
            ("start", "u1"),  # which long curve's first tip is marked
            ("margin", "u1"),
            ("checksum", "<u4"),
        ]
    )


def seal(records: np.ndarray) -> None:
    """Fill in the records' checksums, in place: the CRC-32 of the rest of each record."""
    size = records.dtype.itemsize
    data = memoryview(records.tobytes())
    records["checksum"] = [
        zlib.crc32(data[end - size : end - 4]) for end in range(size, len(data) + 1, size)
    ]


def sound(records: np.ndarray) -> int:
    """Return how many records, from the first on, have a correct checksum."""
    size = records.dtype.itemsize
    data = records.view(np.uint8).data  # of the mapped file, and no copy
    for number, noted in enumerate(records["checksum"].tolist()):
        if zlib.crc32(data[number * size : (number + 1) * size - 4]) != noted:
            return number
    return len(records)
