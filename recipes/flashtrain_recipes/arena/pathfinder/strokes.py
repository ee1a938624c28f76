"""A batch of Pathfinder images as what is drawn in them, not yet as pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


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
