"""What the task's own program draws, in NumPy and Pillow, as we understand it: slow and
plain, to compare with.

Positions are (y, x), as there; angles are radians. Masks and images are
fractions of full brightness.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image, ImageDraw

from flashtrain_recipes.arena.pathfinder.parameters import PathfinderParameters

FINER = 2
Place = tuple[int, int]


def stepped(place: Place, angle: float, length: float) -> Place:
    return math.ceil(place[0] + length * math.sin(angle)), math.ceil(
        place[1] + length * math.cos(angle)
    )


def turned_back(angle: float) -> float:
    return angle + math.pi if angle < 0 else angle - math.pi


def as_bytes(image: np.ndarray) -> np.ndarray:
    """Scaled so that the extremes are 0 and 255, as scipy.misc did."""
    extent = image.max() - image.min() or 1.0
    scaled: np.ndarray = np.clip((image - image.min()) * (255.0 / extent), 0, 255) + 0.5
    return scaled.astype(np.uint8)


def smaller(image: np.ndarray, size: int) -> np.ndarray:
    return np.asarray(
        Image.fromarray(as_bytes(image)).resize((size, size), Image.Resampling.LANCZOS)
    )


def disc(radius: int) -> np.ndarray:
    y, x = np.ogrid[-radius : radius + 1, -radius : radius + 1]
    return x**2 + y**2 <= radius**2


def dilated(image: np.ndarray, shape: np.ndarray, outside: float = 0.0) -> np.ndarray:
    """Each pixel's maximum over the pixels that a shape (odd, odd) around it covers."""
    half = shape.shape[0] // 2
    padded = np.pad(image, half, constant_values=outside)
    found = np.full(image.shape, -np.inf)
    for y, x in np.argwhere(shape):
        found = np.maximum(found, padded[y : y + image.shape[0], x : x + image.shape[1]])
    return found


def dash(
    size: int,
    start: Place,
    angle: float,
    parameters: PathfinderParameters,
    margin: int,
    contrast: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """(size, size) float32 each: the dash at its contrast, and what it keeps for itself."""
    half = parameters.dash_length + math.ceil(parameters.thickness) + margin
    middle = FINER * half
    end = stepped((middle, middle), angle, FINER * parameters.dash_length)
    fine = Image.new("F", (2 * middle + 1, 2 * middle + 1))
    width = round(FINER * parameters.thickness)
    ImageDraw.Draw(fine).line([(middle, middle), (end[1], end[0])], fill="white", width=width)
    line = np.asarray(fine)
    mask = dilated(line, disc(FINER * margin))
    small = [smaller(image, 2 * half + 1) / 255 for image in (line, mask)]
    drawn = []
    for image in (small[0] * contrast, small[1]):
        # A border as wide as the window, so that what lies outside of the image is cut off.
        whole = np.zeros((size + 4 * half, size + 4 * half), dtype=np.float32)
        y, x = start[0] + half, start[1] + half
        whole[y : y + 2 * half + 1, x : x + 2 * half + 1] = image
        drawn.append(whole[2 * half : 2 * half + size, 2 * half : 2 * half + size])
    return drawn[0], drawn[1]


def marker(size: int, centre: Place, radius: float) -> np.ndarray:
    """(size, size) float64: a disc, reduced with the whole image."""
    y, x = np.ogrid[: FINER * size, : FINER * size]
    fine = (x - FINER * centre[1]) ** 2 + (y - FINER * centre[0]) ** 2 <= (FINER * radius) ** 2
    return smaller(fine.astype(np.float64), size) / 255


def picture(
    dashes: list[tuple[Place, float]],
    markers: list[Place],
    parameters: PathfinderParameters,
    margin: int,
) -> np.ndarray:
    """(side, side) uint8 of dashes, each where it starts and its angle, and of markers. The dashes
    of the two long curves come first."""
    size, contrasts = parameters.side, (parameters.long_contrast, parameters.short_contrast)
    shapes = [
        dash(
            size,
            start,
            angle,
            parameters,
            margin,
            contrasts[number >= 2 * parameters.contour_dashes],
        )[0]
        for number, (start, angle) in enumerate(dashes)
    ]
    discs = [marker(size, centre, parameters.marker_radius) for centre in markers]
    return as_bytes(np.max([np.zeros((size, size)), *shapes, *discs], axis=0))
