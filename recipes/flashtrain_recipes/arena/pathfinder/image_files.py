"""Pathfinder images that another program drew: a folder of PNG files, or one .npz.

A folder is laid out as the task's own program (github.com/drewlinsley/pathfinder) writes it, and as the Long Range
Arena published it: imgs/<batch>/sample_<n>.png, and a line for each image in metadata/<batch>.npy: its folder, its
name, its number and its label, then more. metadata is an array of text, or plain lines (the Arena's). A .npz holds
x, (N, side, side) uint8, and y, (N,) labels. N images, S pixels of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from flashtrain.data.sequences import SequenceBatch, SequenceShape
from flashtrain.errors import UserError
from flashtrain_recipes.arena.pathfinder.parameters import CONTOURS

METADATA = "metadata"
SHARE_HELD_OUT = 10  # one image of so many validates, and as many test, as in the Arena
# The Arena's folder names of a contour, and the second half of them where labels lie apart.
_CONTOUR_FOLDERS = {"easy": "curv_baseline", "intermediate": "curv_contour_length_9", "hard": "curv_contour_length_14"}
_NEGATIVE = "_neg"


class Listed(NamedTuple):
    """Image files and their labels (N,) uint8, in the order of their names; empty: files without a byte, left out."""

    files: list[Path]
    labels: np.ndarray
    empty: int


class PathfinderFiles:
    """path: a folder or .npz as above, or a folder with pathfinder32, curv_contour_length_14 and the like, of which
    side and contour say which. validation, test: images held out, drawn by `seed` (None: a tenth each).

    Images are read when they are used. UserError: no such images, of another side, damaged, or too few.
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
        self._images: ImageSamples | None = None

    @property
    def shape(self) -> SequenceShape:
        return SequenceShape(classes=2, length=self.side**2, side=self.side)

    def describe(self) -> str:
        images = self._all()
        left_out = f", {images.empty:,} empty files left out" if images.empty else ""
        return f"Pathfinder-{self.side} from {images.where}: {len(images):,} images{left_out}"

    def prepare(self) -> None:
        """Find the images, and look at the first."""
        self._all()[[0]]

    def split(self, name: str) -> ImageSamples:
        """One of "train", "validation", "test"; no image is in two of them."""
        images = self._all()
        count = len(images)
        sizes = {part: count // SHARE_HELD_OUT if size is None else size for part, size in self.counts.items()}
        held_out = sum(sizes.values())
        most = count if name == "test" else count - 1
        needed = sizes["test"] if name == "test" else held_out
        if needed > most or (name != "train" and not sizes[name]):
            raise UserError(
                f"{images.where} has {count:,} images: sequence.validation={sizes['validation']:,} and "
                f"sequence.test={sizes['test']:,} must leave some to train on, and hold some out."
            )
        order = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((self.seed, 11)))).permutation(count)
        ends = {"test": (0, sizes["test"]), "validation": (sizes["test"], held_out), "train": (held_out, count)}
        begin, end = ends[name]
        return images.chosen(np.sort(order[begin:end]))

    def _all(self) -> ImageSamples:
        if self._images is None:
            self._images = _open(self.path, self.side, self.contour)
        return self._images


class ImageSamples:
    """Images by number (what flashtrain.data.loader calls Samples). where: the folder or file, in words."""

    def __init__(self, pixels: Sequence[Path] | np.ndarray, labels: np.ndarray, side: int, where: str, empty: int = 0):
        self._pixels, self._labels = pixels, labels
        self.side, self.where, self.empty = side, where, empty
        self.context = side * side
        self.tokens = len(labels) * self.context

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, samples: list[int]) -> SequenceBatch:
        if isinstance(self._pixels, np.ndarray):
            pixels = self._pixels[samples]
        else:
            pixels = np.stack([read_image(self._pixels[number], self.side) for number in samples])
        labels = torch.from_numpy(self._labels[samples].astype(np.int64))
        return SequenceBatch(tokens=torch.from_numpy(pixels.reshape(len(samples), -1)), labels=labels)

    def chosen(self, numbers: np.ndarray) -> ImageSamples:
        """These images, in this order."""
        if isinstance(self._pixels, np.ndarray):
            pixels: Sequence[Path] | np.ndarray = self._pixels[numbers]
        else:
            pixels = [self._pixels[number] for number in numbers]
        return ImageSamples(pixels, self._labels[numbers], self.side, self.where, self.empty)


def read_image(path: Path, side: int) -> np.ndarray:
    """The grey levels (side, side) uint8 of a PNG file. Raises UserError for any other file, or another side."""
    try:
        with Image.open(path, formats=("PNG",)) as image:
            if image.size != (side, side):
                raise UserError(f"{path} is {image.size[0]} x {image.size[1]} pixels, not {side} x {side}.")
            return np.array(image.convert("L"))
    except OSError as error:  # Pillow does not say which file is cut off
        raise UserError(f"{path} is no PNG image, or is damaged: {error}.") from error


def list_images(folder: Path) -> Listed:
    """The images that the files in folder/metadata name. Raises UserError where one is missing or has no label."""
    files: list[Path] = []
    labels: list[int] = []
    empty = 0
    tables = sorted((folder / METADATA).glob("*.npy"), key=lambda path: (len(path.name), path.name))
    for table in tables:
        for number, words in enumerate(_metadata(table), start=1):
            if len(words) < 4 or words[3] not in ("0", "1"):
                raise UserError(f"{table}, line {number}, must name a folder, a file, a number and a label, 0 or 1.")
            file = folder / words[0] / words[1]
            if not file.is_file():
                raise UserError(f"{table}, line {number}, names {words[0]}/{words[1]}, which is not there.")
            if not file.stat().st_size:  # the Arena's release has such
                empty += 1
                continue
            files.append(file)
            labels.append(int(words[3]))
    if not files:
        raise UserError(f"{folder / METADATA} names no images.")
    return Listed(files, np.array(labels, dtype=np.uint8), empty)


def _open(path: Path, side: int, contour: str) -> ImageSamples:
    if path.suffix == ".npz":
        return ImageSamples(*read_archive(path, side), side, str(path))
    folders = _folders(path, side, contour)
    parts = [list_images(folder) for folder in folders]
    files = [file for part in parts for file in part.files]
    labels = np.concatenate([part.labels for part in parts])
    return ImageSamples(files, labels, side, str(folders[0]), sum(part.empty for part in parts))


def read_archive(path: Path, side: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, side, side) uint8 and labels (N,) uint8 of a .npz. side: that they must have (None: any).

    Raises UserError for arrays of another shape.
    """
    with np.load(path, allow_pickle=False) as archive:
        images, labels = archive["x"], archive["y"]
    shape = (len(labels), side or images.shape[1], side or images.shape[1])
    if images.shape != shape or images.dtype != np.uint8 or not np.isin(labels, (0, 1)).all():
        size = side or "side"
        raise UserError(
            f"{path}: x must be (images, {size}, {size}) bytes and y as many labels, 0 or 1; they are {images.shape} "
            f"{images.dtype} and {labels.shape}."
        )
    return images, labels.astype(np.uint8)


def _folders(path: Path, side: int, contour: str) -> list[Path]:
    """The folders with metadata: one, or two where joined and separate contours lie apart."""
    lengths = {str(dashes): name for name, dashes in CONTOURS.items()}
    wanted = _CONTOUR_FOLDERS.get(lengths.get(contour, contour), "")
    for folder in (path, path / f"pathfinder{side}"):
        for inner in (folder, folder / wanted) if wanted else (folder,):
            if (inner / METADATA).is_dir():
                negative = inner.with_name(inner.name + _NEGATIVE)
                return [inner, *([negative] if (negative / METADATA).is_dir() else [])]
    if not path.is_dir():
        raise UserError(f"sequence.path={path} is no folder of images, and no .npz file.")
    names = sorted(entry.name for entry in path.iterdir() if entry.is_dir())[:6]
    there = f"it holds {', '.join(names)}" if names else "it holds no folders"
    raise UserError(
        f"{path} has no {METADATA}/ beside its imgs/, no {wanted or 'folder of this contour'} and no pathfinder{side}: "
        f"{there}."
    )


def _metadata(table: Path) -> list[list[str]]:
    """The words of each line of a metadata file of either kind."""
    with table.open("rb") as file:
        is_array = file.read(6) == np.lib.format.MAGIC_PREFIX
    if not is_array:
        return [line.split() for line in table.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = np.load(table, allow_pickle=False).tolist()
    return [[word if isinstance(word, str) else word.decode("latin-1") for word in row] for row in rows]
