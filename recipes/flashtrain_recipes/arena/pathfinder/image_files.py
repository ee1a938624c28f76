"""Pathfinder images that another program drew: a folder of PNG files, or one .npz.

A folder is laid out as the task's own program (github.com/drewlinsley/pathfinder) writes it,
and as the Long Range Arena published it: imgs/<batch>/sample_<n>.png, and a line for each
image in metadata/<batch>.npy: its folder, name, number and label, then more. metadata is an
array of text, or plain lines (the Arena's). A .npz holds x, (N, side, side) uint8, and y,
(N,) labels, of N images.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from flashtrain.data.loader import epoch_order
from flashtrain.data.sequences import SequenceBatch, SequenceShape
from flashtrain.errors import UserError
from flashtrain_recipes.arena.pathfinder.parameters import CONTOURS

METADATA = "metadata"
SHARE_HELD_OUT = 10  # one image of so many validates, and as many test, as in the Arena
# The Arena's folder names of a contour, and the second half of them where labels lie apart.
_CONTOUR_FOLDERS = {
    "easy": "curv_baseline",
    "intermediate": "curv_contour_length_9",
    "hard": "curv_contour_length_14",
}
_NEGATIVE = "_neg"


class PathfinderFiles:
    """Images that another program drew, read from files when they are used.

    Args:
        path: a folder or .npz file as at the top of image_files.py, or a folder of such folders,
            called pathfinder32, curv_contour_length_14 and the like, of which side and contour
            choose one.
        validation, test: how many images are held out for each; None: a tenth each.
        seed: decides which images are held out.

    Raises:
        UserError: when images are used: there are none, too few, or some of another side.
    """

    def __init__(
        self,
        path: str | Path,
        side: int,
        *,
        contour: str = "hard",
        validation: int | None = None,
        test: int | None = None,
        seed: int = 0,
    ) -> None:
        self.path, self.side, self.contour, self.seed = Path(path).expanduser(), side, contour, seed
        self.counts = {"validation": validation, "test": test}

    @property
    def shape(self) -> SequenceShape:
        return SequenceShape(classes=2, length=self.side**2, side=self.side)

    def describe(self) -> str:
        return f"Pathfinder-{self.side} from {self.path}: {len(self._all):,} images"

    def prepare(self) -> None:
        """Find the images, and read the first one."""
        self._all[[0]]

    def split(self, name: str) -> ImageSamples:
        """Return the images of the split "train", "validation" or "test"; splits share no image."""
        count = len(self._all)
        test, validation = (
            count // SHARE_HELD_OUT if self.counts[part] is None else int(self.counts[part] or 0)
            for part in ("test", "validation")
        )
        order = epoch_order(count, self.seed, 11)
        parts = {
            "test": order[:test],
            "validation": order[test:][:validation],
            "train": order[test + validation :],
        }
        wanted = {"test": test, "validation": validation}.get(name, 1)
        if len(parts[name]) < wanted or not wanted:
            raise UserError(
                f"{self.path} has {count:,} images: sequence.validation={validation:,} and "
                f"sequence.test={test:,} must leave some to train on, and hold some out."
            )
        return self._all.chosen(np.sort(parts[name]))

    @cached_property
    def _all(self) -> ImageSamples:
        if self.path.suffix == ".npz":
            with np.load(self.path, allow_pickle=False) as archive:
                images, labels = archive["x"], archive["y"]
            if (
                images.shape != (len(labels), self.side, self.side)
                or not np.isin(labels, (0, 1)).all()
            ):
                raise UserError(
                    f"{self.path}: x must be (images, {self.side}, {self.side}) bytes and y as "
                    f"many labels, 0 or 1; they are {images.shape} and {labels.shape}."
                )
            return ImageSamples(images.astype(np.uint8, casting="safe"), labels, self.side)
        listed = [
            one
            for folder in _folders(self.path, self.side, self.contour)
            for one in list_images(folder)
        ]
        files, labels = zip(*listed, strict=True)
        return ImageSamples(np.array(files, dtype=object), np.array(labels), self.side)


class ImageSamples:
    """Images by number, as a dataset (flashtrain.data.loader.Samples).

    Args:
        pixels: (N, side, side) uint8, or (N,) paths of files.
        labels: (N,), 0 or 1.
    """

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, side: int) -> None:
        self._pixels, self._labels, self.side = pixels, labels.astype(np.int64), side
        self.context = side * side
        self.tokens = len(labels) * self.context

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, samples: list[int]) -> SequenceBatch:
        pixels = self._pixels[samples]
        if pixels.ndim == 1:
            pixels = np.stack([read_image(file, self.side) for file in pixels])
        tokens = torch.from_numpy(pixels.reshape(len(samples), -1))
        return SequenceBatch(tokens=tokens, labels=torch.from_numpy(self._labels[samples]))

    def chosen(self, numbers: np.ndarray) -> ImageSamples:
        """Return the images of these numbers, in this order."""
        return ImageSamples(self._pixels[numbers], self._labels[numbers], self.side)


def read_image(path: Path, side: int) -> np.ndarray:
    """Return the grey levels of a PNG file, (side, side) uint8. Raises
    UserError for another size."""
    with Image.open(path, formats=("PNG",)) as image:
        if image.size != (side, side):
            raise UserError(
                f"{path} has {image.size[0]} x {image.size[1]} pixels, expected {side} x {side}."
            )
        return np.array(image.convert("L"))


def list_images(folder: Path) -> list[tuple[Path, int]]:
    """Return (file, label) of each image that the files in folder/metadata list,
    leaving out files of 0 bytes.

    Raises:
        UserError: an image has no label, or there are no images.
    """
    found = []
    for table in sorted(
        (folder / METADATA).glob("*.npy"), key=lambda path: (len(path.name), path.name)
    ):
        for number, words in enumerate(_metadata(table), start=1):
            if len(words) < 4 or words[3] not in ("0", "1"):
                raise UserError(
                    f"{table}, line {number}, must be: folder, file, image number, label (0 or 1)."
                )
            file = folder / words[0] / words[1]
            if file.stat().st_size:
                found.append((file, int(words[3])))
    if not found:
        raise UserError(f"{folder / METADATA} names no images: expected a line for each image.")
    return found


def _folders(path: Path, side: int, contour: str) -> list[Path]:
    # one folder with metadata, or two where joined and separate contours lie apart
    lengths = {str(dashes): name for name, dashes in CONTOURS.items()}
    wanted = _CONTOUR_FOLDERS.get(lengths.get(contour, contour), "")
    for folder in (path, path / f"pathfinder{side}"):
        for inner in dict.fromkeys((folder, folder / wanted)):
            if (inner / METADATA).is_dir():
                negative = inner.with_name(inner.name + _NEGATIVE)
                return [inner, *([negative] if (negative / METADATA).is_dir() else [])]
    raise UserError(
        f"sequence.path={path}: expected a .npz file or a folder with imgs/ and {METADATA}/, or "
        f"one that has such a folder called pathfinder{side}{f' or {wanted}' * bool(wanted)}."
    )


def _metadata(table: Path) -> list[list[str]]:
    with table.open("rb") as file:
        is_array = file.read(6) == np.lib.format.MAGIC_PREFIX
    if not is_array:
        return [
            line.split() for line in table.read_text(encoding="utf-8").splitlines() if line.strip()
        ]
    rows = np.load(table, allow_pickle=False).tolist()
    return [
        [word if isinstance(word, str) else word.decode("latin-1") for word in row] for row in rows
    ]
