"""Image of the Long Range Arena: CIFAR-10 (Krizhevsky 2009) in grey, 1,024 pixels in raster order, ten classes."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from flashtrain.data.sequences import Sequences, SequenceSamples, SequenceShape
from flashtrain.errors import UserError
from flashtrain_recipes.arena.sequence_rows import fingerprint, held_out, hub_rows, open_or_build, value_of

VERSION = 1
SIDE, CLASSES = 32, 10
WIDTH = 3 * SIDE * SIDE  # bytes of an image in colour
HELD_OUT = 5000  # training images that validate
LUMINANCE = np.array([0.2989, 0.5870, 0.1140])  # of red, green and blue (ITU-R BT.601, to four digits)
_BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
_PLAIN = {
    ("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"), ("numpy", "ndarray"),
    ("numpy", "dtype"), ("_codecs", "encode"),
}  # fmt: skip


class GreyImages:
    """path: a folder with CIFAR-10's python batches (data_batch_1 ... test_batch) or binary ones (..._1.bin ...),
    or one that holds cifar-10-batches-py or cifar-10-batches-bin. name: instead, a dataset that `datasets` loads, whose
    rows have `img` or `image` and `label`, such as uoft-cs/cifar10. validation: training images held out, drawn by
    `seed`. UserError: neither, or not found.
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
            return open_or_build(key, lambda: self._from_hub(part), self.cache_dir)
        files = self._files(part)
        key = f"image-{fingerprint(files)}-{part}-v{VERSION}"
        return open_or_build(key, lambda: _sequences([_read(file) for file in files]), self.cache_dir)

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
    content = file.read_bytes()
    if file.suffix == ".bin":
        rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, WIDTH + 1)
        return rows[:, 1:], rows[:, 0]
    batch = _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
    return np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])


class _PlainUnpickler(pickle.Unpickler):
    """Reads arrays and plain values, and refuses all else that a pickle could run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PLAIN:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which could run code")
        return super().find_class(module, name)
