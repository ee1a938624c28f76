"""Pathfinder images as they are stored: records of fixed size, and a batch of them as strokes to draw.

A record ends with a checksum of the rest, so that what a crash left half written is not taken for an image.
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
    """B images of at most N dashes, as tensors; positions are (x, y) of pixels.

    windows: (B, N, 3) int32, where each dash's window lies (x, y) and its number in the table of windows (raster), 0
    past an image's own; the first dashes are those of the two long curves. markers: (B, 2, 2) int32, the centres of the
    two discs. labels: (B,) int64, 1 where one long curve joins the discs.
    """

    windows: Tensor
    markers: Tensor
    labels: Tensor


def together(parts: Sequence[Strokes], order: Tensor) -> Strokes:
    """The images of several batches one after the other, whatever N each has, then in this order."""
    most = max(part["windows"].shape[1] for part in parts)
    windows = [F.pad(part["windows"], (0, 0, 0, most - part["windows"].shape[1])) for part in parts]
    markers, labels = (torch.cat([part[name] for part in parts])[order] for name in ("markers", "labels"))
    return Strokes(windows=torch.cat(windows)[order], markers=markers, labels=labels)


def record_type(parameters: PathfinderParameters) -> np.dtype[np.void]:
    """One image: its dashes, and the facts about it; checksum last."""
    dashes = parameters.most_dashes
    return np.dtype(
        [
            ("angles", "<u2", (dashes,)),  # numbers of directions (windows.directions)
            ("heads", "u1" if parameters.side <= 256 else "<u2", (dashes, 2)),  # tips (x, y) that dashes are drawn from
            ("count", "u1"),
            ("label", "u1"),
            ("start", "u1"),  # which long curve's first tip is marked
            ("margin", "u1"),
            ("checksum", "<u4"),
        ]
    )


def seal(records: np.ndarray) -> None:
    """Fill in the records' checksums: CRC-32 of all of a record but the checksum."""
    size = records.dtype.itemsize
    data = memoryview(records.tobytes())
    records["checksum"] = [zlib.crc32(data[end - size : end - 4]) for end in range(size, len(data) + 1, size)]


def sound(records: np.ndarray) -> int:
    """How many records, from the first, carry their checksum."""
    size = records.dtype.itemsize
    data = records.view(np.uint8).data  # of the mapped file, and no copy
    for number, noted in enumerate(records["checksum"].tolist()):
        if zlib.crc32(data[number * size : (number + 1) * size - 4]) != noted:
            return number
    return len(records)
