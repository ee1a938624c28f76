"""Drawing batches of Pathfinder images on any device, in integers (except for varied brightness),
so that every device gives the same pixels.

Each shape is looked up in a table of windows (windows.py), small images of one dash or disc: one
for each direction of a dash and each margin (the free space around the dashes; an image has one
margin), and one for each position of a disc. Windows hold levels, indices into the list of the few
brightnesses that a pixel may have, and overlapping windows are combined by their maximum. The last
step, which scales whole images so that their extremes are 0 and 255, is a table too.

B images, N dashes of an image, W width of a window, D directions, M margins, L levels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashtrain_recipes.arena.pathfinder.parameters import PathfinderParameters
from flashtrain_recipes.arena.pathfinder.windows import dash_windows, disc_windows, half_window

# Pixels of windows that are drawn at once: some hundred MB of temporary tensors, and
# enough work for a GPU.
PIXEL_CHUNK = 8_000_000


class DrawingTables(NamedTuple):
    """The tables by which images with the same parameters are drawn, on one device."""

    # (1 + 2 M D, W, W) int32 levels: nothing, then each direction and margin of the long curves,
    # then of the short ones
    dashes: Tensor
    corners: Tensor  # (1 + 2 M D, 2) int64, (x, y): from a dash's tip to its window's first pixel
    discs: Tensor  # (places * places, V, V) int32 levels, V pixels wide
    grey: Tensor  # (L, L) uint8: [an image's brightest level, level]
    light: Tensor  # (L,) float32: each level's brightness

    @property
    def border(self) -> int:
        """How many pixels the drawing of a dash or disc may reach beyond the image's edge."""
        return max(self.dashes.shape[-1], self.discs.shape[-1])


def rasterise(
    windows: Tensor,
    markers: Tensor,
    parameters: PathfinderParameters,
    brightness: Tensor | None = None,
) -> Tensor:
    """Draw images with the pixels of the original Pathfinder program, (B, side, side)
    uint8, on the same device.

    Args:
        windows: (B, N, 3) int32, the tip (x, y) of each dash and the index of its window.
        markers: (B, 2, 2) int32, the centres (x, y) of the two discs.
        brightness: (B, 2) float32, factors of the brightness of each image's long and
            short curves; None: 1.
    """
    contrasts = parameters.long_contrast, parameters.short_contrast
    if brightness is not None:
        return _in_contrasts(
            windows, markers, parameters, brightness * brightness.new_tensor(contrasts)
        )
    tables = drawing_tables(parameters, contrasts, windows.device)
    at_once = max(1, PIXEL_CHUNK // (windows.shape[1] * tables.dashes.shape[-1] ** 2))
    parts = zip(windows.split(at_once), markers.split(at_once), strict=True)
    return torch.cat([draw(*part, parameters.side, tables) for part in parts])


def draw(windows: Tensor, markers: Tensor, side: int, tables: DrawingTables) -> Tensor:
    """Draw a whole batch of images at once, and return the pixels, (B, side, side) uint8;
    arguments as in rasterise."""
    levels = drawn_levels(windows, markers, side, tables)
    brightest = levels.amax(dim=(1, 2), keepdim=True)
    return tables.grey.flatten()[brightest * tables.grey.shape[1] + levels]


def _in_contrasts(
    windows: Tensor, markers: Tensor, parameters: PathfinderParameters, contrasts: Tensor
) -> Tensor:
    # each image in contrasts of its own: (B, 2) float32, of the long curves'
    # dashes and of the short
    side, tables = parameters.side, drawing_tables(parameters, (1.0, 1.0), windows.device)
    long = 2 * parameters.contour_dashes
    of_long, of_short = contrasts[:, :, None, None].unbind(dim=1)
    light = torch.maximum(
        of_long * tables.light[drawn_levels(windows[:, :long], None, side, tables)],
        of_short * tables.light[drawn_levels(windows[:, long:], None, side, tables)],
    )
    light = torch.maximum(light, tables.light[drawn_levels(windows[:, :0], markers, side, tables)])
    brightest = light.amax(dim=(1, 2), keepdim=True).clamp(min=1e-9)
    return (light * (255 / brightest) + 0.5).to(torch.uint8)


def drawn_levels(
    windows: Tensor, markers: Tensor | None, side: int, tables: DrawingTables
) -> Tensor:
    """Draw as `draw`, but return each pixel's level, (B, side, side) int32: its index into the
    table of brightnesses. markers=None: no discs are drawn."""
    images, border = len(windows), tables.border
    width = side + 2 * border
    canvas = torch.zeros(images, width * width, dtype=torch.int32, device=windows.device)
    tips, shapes = windows[..., :2].long(), windows[..., 2].long()
    _put(canvas, tables.dashes[shapes], tips + tables.corners[shapes] + border, width)
    if markers is not None:
        tips = markers.long()
        places, reach = round(len(tables.discs) ** 0.5), tables.discs.shape[-1] // 2
        place = disc_place(tips, side, places)
        _put(
            canvas,
            tables.discs[place[..., 1] * places + place[..., 0]],
            tips - reach + border,
            width,
        )
    inside = slice(border, border + side)
    return canvas.view(images, width, width)[:, inside, inside]


def disc_place(tips: Tensor, side: int, places: int) -> Tensor:
    """Return the index of the window that shows a disc at each coordinate of `tips`, among the
    `places` that disc_windows() has along each axis."""
    middle = places // 2
    return torch.where(tips <= middle, tips, places - 1 - (side - 1 - tips).clamp(max=middle))


@lru_cache(maxsize=16)
def drawing_tables(
    parameters: PathfinderParameters, contrasts: tuple[float, float], device: torch.device
) -> DrawingTables:
    """Return tables for drawing images with these parameters. contrasts: brightness of
    long and of short curves."""
    windows, corners = [], []
    for margin in parameters.margins:
        half = half_window(parameters, margin)
        drawn, first = _cropped(dash_windows(parameters, margin))
        windows.append(drawn)
        corners.append(first - half)
    width = max(drawn.shape[-1] for drawn in windows)
    padded = [np.pad(drawn, ((0, 0), *((0, width - drawn.shape[-1]),) * 2)) for drawn in windows]
    dashes, nothing = np.concatenate(padded), np.zeros((1, width, width), dtype=np.int32)
    discs = disc_windows(parameters.marker_radius)
    brightness, (of_long, of_short), of_disc = _levels(contrasts)
    scaled = brightness[None, :] * (255 / np.maximum(brightness[:, None], 1e-9))
    tables = (
        np.concatenate([nothing, of_long[dashes], of_short[dashes]]),
        np.concatenate([np.zeros((1, 2), dtype=np.int64), *corners, *corners]),
        of_disc[discs].reshape(-1, *discs.shape[-2:]),
        np.floor(np.clip(scaled, 0, 255) + 0.5).astype(np.uint8),
        brightness.astype(np.float32),
    )
    return DrawingTables(*(torch.from_numpy(table).to(device) for table in tables))


def _levels(contrasts: tuple[float, float]) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    # Brightness (L,) of the levels, and the level (256,) int32 of a dash's byte, at each contrast,
    # and of a disc's. The program has dashes as 32-bit fractions, times the contrast, and discs as
    # 64-bit ones. (A later version of it has both in 32 bits, and a few pixels that lie at a half
    # then round to the other side: one grey level.)
    fractions = np.arange(256) / 255
    dashes = [
        (fractions * contrast).astype(np.float32).astype(np.float64) for contrast in contrasts
    ]
    brightness = np.unique(np.concatenate([*dashes, fractions]))
    *of_dashes, of_disc = (
        np.searchsorted(brightness, of).astype(np.int32) for of in (*dashes, fractions)
    )
    return brightness, of_dashes, of_disc


def _cropped(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # windows (D, w, w) cut to the smallest width W that holds each, and what was cut off
    # before, (D, 2), (x, y)
    firsts, widths = [], []
    for axis in (1, 2):  # the axis that is summed over: columns remain, then rows
        seen = windows.max(axis=axis) > 0
        first = seen.argmax(axis=1)
        firsts.append(first)
        widths.append(windows.shape[1] - seen[:, ::-1].argmax(axis=1) - first)
    width = int(max(map(np.max, widths)))
    padded = np.pad(windows, ((0, 0), (0, width), (0, width)))
    cut = [
        window[y : y + width, x : x + width] for window, x, y in zip(padded, *firsts, strict=True)
    ]
    return np.stack(cut), np.stack(firsts, axis=1)


def _put(canvas: Tensor, shapes: Tensor, corner: Tensor, width: int) -> None:
    # combines shapes (B, N, W, W) into the canvas (B, width * width) by maximum;
    # corner: (B, N, 2), (x, y)
    steps = torch.arange(shapes.shape[-1], device=canvas.device)
    rows, columns = corner[..., 1:] + steps, corner[..., :1] + steps  # (B, N, W)
    place = rows[..., None] * width + columns[..., None, :]
    canvas.scatter_reduce_(1, place.flatten(1), shapes.flatten(1), reduce="amax")
