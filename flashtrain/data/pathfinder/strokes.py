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
    dashes are those of the two long curves. count: (B,) int64, dashes of each image. markers: (B, 2, 2) float32, the
    centres of the two discs. labels: (B,) int64, 1 where one long curve joins the discs.
    """

    segments: Tensor
    count: Tensor
    markers: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice | Tensor) -> Strokes:
        """Some of the images."""
        return Strokes(self.segments[rows], self.count[rows], self.markers[rows], self.labels[rows])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Strokes:
        """The same strokes on a device."""
        tensors = (self.segments, self.count, self.markers, self.labels)
        return Strokes(*(tensor.to(device, non_blocking=non_blocking) for tensor in tensors))

    def pin_memory(self) -> Strokes:
        """The same strokes in page-locked memory; a DataLoader calls this."""
        tensors = (self.segments, self.count, self.markers, self.labels)
        return Strokes(*(tensor.pin_memory() for tensor in tensors))


def together(parts: Sequence[Strokes]) -> Strokes:
    """The images of several batches one after the other, whatever N each has."""
    most = max(part.segments.shape[1] for part in parts)
    segments = [F.pad(part.segments, (0, 0, 0, most - part.segments.shape[1])) for part in parts]
    rest = (torch.cat([getattr(part, name) for part in parts]) for name in ("count", "markers", "labels"))
    return Strokes(torch.cat(segments), *rest)
