"""Pathfinder images as they are kept: records of fixed size, a file of them, and a batch of them as strokes to draw.

The file is a header of HEADER_BYTES, a line of JSON padded with spaces, then one record an image: 252 bytes at side
128. A record ends with a checksum of the rest, so that what a crash left half written is not taken for an image.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flashtrain_recipes.arena.pathfinder.parameters import ORIGINAL, SMOOTH, PathfinderParameters


@dataclass(frozen=True)
class Strokes:
    """B images of at most N dashes; positions in pixels, (x, y), pixel (0, 0) centred on (0, 0).

    segments: (B, N, 4) float32, each dash's tail and head as x, y, x, y; zeros past an image's own dashes. The first
    dashes are those of the two long curves. windows: (B, N, 3) int32, of drawing=original where each dash's window lies
    (x, y) and its number in the table of windows (original.raster), 0 past an image's own; zeros of others.
    count: (B,) int64, dashes of each image. markers: (B, 2, 2) float32, the centres of the two discs. labels: (B,)
    int64, 1 where one long curve joins the discs.
    """

    segments: Tensor
    windows: Tensor
    count: Tensor
    markers: Tensor
    labels: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.segments, self.windows, self.count, self.markers, self.labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice | Tensor) -> Strokes:
        """Some of the images."""
        return Strokes(*(tensor[rows] for tensor in self.tensors))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Strokes:
        """The same strokes on a device."""
        return Strokes(*(tensor.to(device, non_blocking=non_blocking) for tensor in self.tensors))

    def pin_memory(self) -> Strokes:
        """The same strokes in page-locked memory; a DataLoader calls this."""
        return Strokes(*(tensor.pin_memory() for tensor in self.tensors))


def together(parts: Sequence[Strokes]) -> Strokes:
    """The images of several batches one after the other, whatever N each has."""
    most = max(part.segments.shape[1] for part in parts)
    padded = (
        torch.cat([F.pad(getattr(part, name), (0, 0, 0, most - part.segments.shape[1])) for part in parts])
        for name in ("segments", "windows")
    )
    rest = (torch.cat([getattr(part, name) for part in parts]) for name in ("count", "markers", "labels"))
    return Strokes(*padded, *rest)


MAGIC = "flashtrain pathfinder"
# Raised when the same seed would give other images, or the file's form changes: of each drawing. A file that names no
# drawing is of the first, which was the only one.
GENERATOR_VERSIONS = {SMOOTH: 1, ORIGINAL: 2}
HEADER_BYTES = 1024


@dataclass(frozen=True)
class Header:
    """What a file holds: which images, by which generator."""

    parameters: PathfinderParameters
    seed: int
    split: str
    drawing: str = ORIGINAL

    @property
    def version(self) -> int:
        """Of the drawing's generator."""
        return GENERATOR_VERSIONS[self.drawing]

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Header:
        """The inverse of as_dict."""
        parameters = PathfinderParameters.from_dict(told["parameters"])
        return cls(parameters, told["seed"], told["split"], told.get("drawing", SMOOTH))

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        told = {"format": MAGIC, "version": self.version, "seed": self.seed, "split": self.split}
        own = {} if self.drawing == SMOOTH else {"drawing": self.drawing}
        return {**told, **own, "parameters": self.parameters.as_dict()}

    def to_bytes(self) -> bytes:
        """HEADER_BYTES bytes."""
        return json.dumps(self.as_dict()).encode().ljust(HEADER_BYTES - 1) + b"\n"


def read_header(path: Path) -> Header:
    """The header of a file."""
    with path.open("rb") as file:
        return Header.from_dict(json.loads(file.read(HEADER_BYTES)))


def record_type(parameters: PathfinderParameters) -> np.dtype[np.void]:
    """One image: its dashes, and the facts about it; checksum last.

    drawing=smooth: the dashes' heads (x, y) and angle codes. drawing=original: the tips (x, y) that dashes are drawn
    from, and their directions' numbers (original.windows.directions).
    """
    dashes = parameters.most_dashes
    return np.dtype(
        [
            ("angles", "<u2", (dashes,)),
            ("heads", "u1" if parameters.side <= 256 else "<u2", (dashes, 2)),
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
