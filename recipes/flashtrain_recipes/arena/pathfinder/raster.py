"""Pathfinder images drawn smooth: from dashes to grey pixels, a batch at a time, on the device that the strokes are on.

A dash is drawn into a small window around it and the windows are put together by their maximum: 60 dashes of 11 x 11
pixels are 130 times fewer distances than each pixel of a 128 x 128 image to each dash. A maximum does not depend on the
order, so that the image is the same in every run, and shapes do not depend on the data: torch.compile takes all of it.
The generator's small tables of shapes need the same coverage of pixels in plain NumPy.

Letters: B images, N dashes of an image, W width of a window, Q points a window has along each side (2 W).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from flashtrain_recipes.arena.pathfinder.parameters import PathfinderParameters
from flashtrain_recipes.arena.pathfinder.records import Strokes

SUPERSAMPLING = 2


def capsule_coverage(tail: np.ndarray, head: np.ndarray, radius: float, reach: int) -> np.ndarray:
    """Coverage in [0, 1] of the pixels around (0, 0) by all points within `radius` of the segment from tail to head.

    tail, head: (2,) as (x, y), in pixels. Returns (2 reach + 1, 2 reach + 1), [y, x], pixel (0, 0) in its middle.
    A point of the finer grid counts in full inside the shape and fades over one step of that grid at its rim.
    """
    fine = (np.arange((2 * reach + 1) * SUPERSAMPLING) + 0.5) / SUPERSAMPLING - 0.5 - reach
    x, y = fine[None, :], fine[:, None]
    along = head - tail
    length_squared = float(along @ along)
    share = ((x - tail[0]) * along[0] + (y - tail[1]) * along[1]) / (length_squared or 1.0)
    share = np.clip(share, 0.0, 1.0)
    distance = np.hypot(x - tail[0] - share * along[0], y - tail[1] - share * along[1])
    points = np.clip((radius - distance) * SUPERSAMPLING + 0.5, 0.0, 1.0)
    size = 2 * reach + 1
    return points.reshape(size, SUPERSAMPLING, size, SUPERSAMPLING).mean(axis=(1, 3))


# Points whose distances are held at once: some hundred MB of temporary tensors, and enough work for a GPU.
POINTS_AT_ONCE = 16_000_000


def rasterise(strokes: Strokes, parameters: PathfinderParameters) -> Tensor:
    """(B, side, side) uint8, [row, column]: dashes at `contrast`, discs at 255, black ground.

    Each shape's coverage is taken at 2 x 2 points of a pixel, where it fades over one step of that finer grid at the
    rim, then averaged. A dash is brightened until its brightest pixel has the full contrast (a thin one covers no
    pixel wholly). Equal on every device but for rounding, which may change a pixel by one grey level.
    """
    window = _window(parameters.dash_length / 2 + parameters.thickness / 2)
    points = strokes.segments.shape[1] * (SUPERSAMPLING * window) ** 2
    at_once = max(1, POINTS_AT_ONCE // points)
    parts = [draw(strokes[start : start + at_once], parameters) for start in range(0, len(strokes), at_once)]
    if not parts:
        side = parameters.side
        return torch.zeros(0, side, side, dtype=torch.uint8, device=strokes.segments.device)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def draw(strokes: Strokes, parameters: PathfinderParameters) -> Tensor:
    """rasterise(), all images at once."""
    images, dashes = strokes.segments.shape[:2]
    device = strokes.segments.device
    reach = parameters.dash_length / 2 + parameters.thickness / 2
    border = max(_window(reach), _window(parameters.marker_radius))
    width = parameters.side + 2 * border
    canvas = torch.zeros(images, width * width, device=device)

    tail, head = strokes.segments[..., :2], strokes.segments[..., 2:]
    shapes, corner = _coverage(tail, head, parameters.thickness / 2, _window(reach))
    brightest = shapes.amax(dim=(-2, -1), keepdim=True).clamp(min=1e-6)
    real = torch.arange(dashes, device=device) < strokes.count[:, None]
    shapes = shapes / brightest * parameters.contrast * real[..., None, None]
    _put(canvas, shapes, corner + border, width)

    discs, corner = _coverage(
        strokes.markers, strokes.markers, parameters.marker_radius, _window(parameters.marker_radius)
    )
    _put(canvas, discs, corner + border, width)
    inside = slice(border, border + parameters.side)
    grey = canvas.view(images, width, width)[:, inside, inside]
    return (grey * 255).round().to(torch.uint8)


def _window(reach: float) -> int:
    """Pixels along each side of a window around a shape that reaches so far from its middle."""
    return 2 * math.ceil(reach + 1) + 1


def _coverage(tail: Tensor, head: Tensor, radius: float, window: int) -> tuple[Tensor, Tensor]:
    """Coverage (B, N, W, W), [y, x], of all within `radius` of the segments (B, N, 2), and the windows' corners.

    corner: (B, N, 2) int64, (x, y) of each window's first pixel.
    """
    corner = torch.floor((tail + head) / 2 + 0.5) - window // 2
    fine = (torch.arange(SUPERSAMPLING * window, device=tail.device) + 0.5) / SUPERSAMPLING - 0.5
    start, along = tail - corner, head - tail  # (B, N, 2)
    length_squared = (along * along).sum(-1)[..., None, None].clamp(min=1e-6)
    from_x = (fine - start[..., :1])[..., None, :]  # (B, N, 1, Q)
    from_y = (fine - start[..., 1:])[..., None]  # (B, N, Q, 1)
    along_x, along_y = along[..., :1, None], along[..., 1:, None]
    share = ((from_x * along_x + from_y * along_y) / length_squared).clamp(0, 1)  # (B, N, Q, Q)
    distance = ((from_x - share * along_x).square() + (from_y - share * along_y).square()).sqrt()
    points = ((radius - distance) * SUPERSAMPLING + 0.5).clamp(0, 1)
    blocks = points.unflatten(-1, (window, SUPERSAMPLING)).unflatten(-3, (window, SUPERSAMPLING))
    return blocks.mean(dim=(-3, -1)), corner.long()


def _put(canvas: Tensor, shapes: Tensor, corner: Tensor, width: int) -> None:
    """Combine shapes (B, N, W, W) into the canvas (B, width * width) by maximum. corner: (B, N, 2), (x, y)."""
    steps = torch.arange(shapes.shape[-1], device=canvas.device)
    rows, columns = corner[..., 1:] + steps, corner[..., :1] + steps  # (B, N, W)
    place = rows[..., None] * width + columns[..., None, :]
    canvas.scatter_reduce_(1, place.flatten(1), shapes.flatten(1), reduce="amax")
