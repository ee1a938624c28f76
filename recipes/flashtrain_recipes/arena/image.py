"""Image of the Long Range Arena: CIFAR-10 (Krizhevsky 2009) in grey, 1,024 pixels in raster order, ten classes."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from flashtrain.data.sequences import ArraySource, Sequences, SequenceSamples, SequenceShape
from flashtrain.data.text_files import one_line
from flashtrain.errors import UserError
from flashtrain.files.foreign_files import read_bytes
from flashtrain_recipes.arena.sequence_rows import fingerprint, held_out, hub_rows, open_or_build, value_of

VERSION = 1
SIDE, CLASSES = 32, 10
WIDTH = 3 * SIDE * SIDE  # bytes of an image in colour
LARGEST_FILE = 2**26  # bytes: a batch has half of that
MOST_OPERATIONS = 1_000_000  # of a pickle: a batch has some 60,000
HELD_OUT = 5000  # training images that validate
LUMINANCE = np.array([0.2989, 0.5870, 0.1140])  # of red, green and blue (ITU-R BT.601, to four digits)
_BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
_PLAIN = {
    ("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"), ("numpy", "ndarray"),
    ("numpy", "dtype"), ("_codecs", "encode"),
}  # fmt: skip

# What the unpickler raises for bytes that are no pickle, or an odd one.
BROKEN_PICKLE_ERRORS = (
    pickle.UnpicklingError, EOFError, LookupError, TypeError, AttributeError, ValueError, ArithmeticError, MemoryError,
    RecursionError, ImportError,
)  # fmt: skip


class GreyImages(ArraySource):
    """path: a folder with CIFAR-10's python batches (data_batch_1 ... test_batch) or binary ones (..._1.bin ...),
    or one that holds cifar-10-batches-py or cifar-10-batches-bin. name: instead, a dataset that `datasets` loads, whose
    rows have `img` or `image` and `label`, such as uoft-cs/cifar10. validation: training images held out, drawn by
    `seed`. UserError: neither, not found, or damaged.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        name: str | None = None,
        *,
        validation: int | None = None,
        seed: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if path is None and not name:
            raise UserError(
                "sequence.data=image is read from disk: sequence.path=FOLDER with CIFAR-10's data_batch_1 to test_batch"
                " (python or binary version), or sequence.name=uoft-cs/cifar10 through `datasets`."
            )
        self.path = None if path is None else Path(path).expanduser()
        self.name, self.seed, self.cache_dir = name, seed, cache_dir
        self.validation = HELD_OUT if validation is None else validation
        self._parts: dict[str, Sequences] = {}

    @property
    def shape(self) -> SequenceShape:
        return SequenceShape(classes=CLASSES, length=SIDE * SIDE, side=SIDE)

    def describe(self) -> str:
        return f"CIFAR-10 in grey from {self.path or self.name}"

    def prepare(self) -> None:
        """Read what is not in the cache."""
        if self._parts:
            return
        train, test = self._opened("train"), self._opened("test")
        kept, out = held_out(len(train.labels), self.validation, self.seed)
        self._parts = {"train": train.chosen(kept), "validation": train.chosen(out), "test": test}

    def split(self, name: str) -> SequenceSamples:
        """One of "train", "validation", "test"."""
        self.prepare()
        return SequenceSamples(self._parts[name], SIDE * SIDE)

    def _opened(self, part: str) -> Sequences:
        if self.path is None:
            key = f"image-{str(self.name).replace('/', '--')}-{part}-v{VERSION}"
            return open_or_build(key, lambda: self._from_hub(part), self.cache_dir, self.shape)
        files = self._files(part)
        key = f"image-{fingerprint(files)}-{part}-v{VERSION}"
        return open_or_build(key, lambda: _sequences([_read(file) for file in files]), self.cache_dir, self.shape)

    def _files(self, part: str) -> list[Path]:
        folder = self.path or Path()
        gaps: list[list[Path]] = []  # of a version that is there in part
        for inner in (folder, folder / "cifar-10-batches-py", folder / "cifar-10-batches-bin"):
            for suffix in ("", ".bin"):
                files = [inner / f"{name}{suffix}" for name in _BATCHES[part]]
                missing = [file for file in files if not file.is_file()]
                if not missing:
                    return files
                if len(missing) < len(files):
                    gaps.append(missing)
        if gaps:
            nearest = min(gaps, key=len)
            raise UserError(f"{nearest[0].parent} has no {', '.join(file.name for file in nearest)} of CIFAR-10.")
        names = ", ".join(_BATCHES[part])
        raise UserError(f"{folder} has no {names} of CIFAR-10 (python version, or binary with .bin).")

    def _from_hub(self, part: str) -> Sequences:
        rows = hub_rows(str(self.name), part)
        images = [np.asarray(value_of(row, ("img", "image"), str(self.name))) for row in rows]
        labels = np.array([int(value_of(row, ("label",), str(self.name))) for row in rows], dtype=np.uint8)
        colours = np.stack(images).transpose(0, 3, 1, 2).reshape(len(images), -1)
        return _sequences([(colours, labels)])


def _sequences(parts: list[tuple[np.ndarray, np.ndarray]]) -> Sequences:
    """From colours (N, 3 * 1024) uint8, red first, and labels (N,)."""
    colours = np.concatenate([part[0] for part in parts]).reshape(-1, 3, SIDE * SIDE)
    grey = np.rint(np.einsum("ncs,c->ns", colours, LUMINANCE)).clip(0, 255).astype(np.uint8)
    labels = np.concatenate([part[1] for part in parts]).astype(np.uint8)
    return Sequences(grey.ravel(), np.arange(len(labels) + 1, dtype=np.int64) * SIDE * SIDE, labels)


def _read(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Colours and labels of one batch file of either version."""
    content = read_bytes(file, LARGEST_FILE)
    if file.suffix == ".bin":
        if not content or len(content) % (WIDTH + 1):
            raise UserError(f"{file} is no binary batch of CIFAR-10: its size is no multiple of {WIDTH + 1} bytes.")
        rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, WIDTH + 1)
        colours, labels = rows[:, 1:], rows[:, 0]
    else:
        colours, labels = _read_pickle(file, content)
    if not ((labels >= 0) & (labels < CLASSES)).all():
        raise UserError(f"{file} is no batch of CIFAR-10: its labels are not all from 0 to {CLASSES - 1}.")
    return colours, labels


def _read_pickle(file: Path, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    try:
        _check_operations(content)
        batch = _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
        colours, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
    except BROKEN_PICKLE_ERRORS as error:
        raise UserError(f"{file} is no python batch of CIFAR-10: {one_line(error)}.") from error
    if colours.dtype != np.uint8 or colours.shape != (len(labels), WIDTH) or labels.dtype.kind not in "iu":
        raise UserError(f"{file} is no python batch of CIFAR-10: its data are {colours.dtype} {colours.shape}.")
    return colours, labels


def _check_operations(content: bytes) -> None:
    """UnpicklingError for more operations than a batch has, or a place far down the list of remembered objects: the
    unpickler makes that list as long as the largest place, and a few bytes may say that it is the two thousand
    millionth."""
    for number, (operation, argument, _) in enumerate(pickletools.genops(content)):
        if number > MOST_OPERATIONS or ("PUT" in operation.name and int(argument or 0) > MOST_OPERATIONS):
            raise pickle.UnpicklingError("it has more parts than a batch of images")


class _PlainUnpickler(pickle.Unpickler):
    """Reads arrays and plain values, and refuses all else that a pickle could run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PLAIN:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which could run code")
        found = super().find_class(module, name)
        return {"_reconstruct": _empty_array, "dtype": _number_type}.get(name, found)


def _empty_array(kind: type, shape: tuple[int, ...], code: bytes) -> np.ndarray:
    """What numpy begins an array with: its size comes with its content, by which it is checked."""
    if kind is not np.ndarray or tuple(shape) != (0,):
        raise pickle.UnpicklingError("an array begins with a size, before its content")
    return np.ndarray((0,), np.int8)


def _number_type(code: str | bytes, *options: Any) -> np.dtype[Any]:
    """A type of plain numbers, as a copy, which the pickle may give a byte order; no objects, no fields."""
    found = np.dtype(code.decode() if isinstance(code, bytes) else code)
    if found.kind not in "biuf":
        raise pickle.UnpicklingError(f"it holds an array of {found}")
    return np.dtype(found, copy=True)
