"""The Arena's task Image: CIFAR-10 (Krizhevsky 2009) in grey, 1,024 pixels in
raster order, ten classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flashtrain.data.hub_source import datasets_library
from flashtrain.data.sequences import SequenceShape
from flashtrain.errors import UserError
from flashtrain_recipes.arena.byte_sequences import FileSource, with_held_out
from flashtrain_recipes.arena.sequence_samples import Sequences

SIDE, CLASSES = 32, 10
WIDTH = 3 * SIDE * SIDE  # bytes of an image in colour
HELD_OUT = 5000  # training images that validate
# Of red, green and blue (ITU-R BT.601, to four digits).
LUMINANCE = np.array([0.2989, 0.5870, 0.1140])
_BATCHES = {
    "train": [f"data_batch_{number}.bin" for number in range(1, 6)],
    "test": ["test_batch.bin"],
}


class GreyImages(FileSource):
    """CIFAR-10's images in grey, read from files or a dataset.

    Args:
        path: a folder with CIFAR-10's binary version (data_batch_1.bin ... test_batch.bin), or one
            that holds cifar-10-batches-bin.
        name: instead of path, a dataset that `datasets` loads, with columns `img` and `label`,
            such as uoft-cs/cifar10.
        validation: how many training images are held out for validation; None: 5,000.
        seed: decides which images are held out.
    """

    needs = (
        "sequence.data=image is read from disk: sequence.path=FOLDER with CIFAR-10's "
        "data_batch_1.bin to test_batch.bin (its binary version), or "
        "sequence.name=uoft-cs/cifar10 through `datasets`."
    )

    def __init__(
        self,
        path: str | Path | None,
        name: str | None = None,
        *,
        validation: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(path, name)
        self.seed, self.validation = seed, HELD_OUT if validation is None else validation

    @property
    def shape(self) -> SequenceShape:
        return SequenceShape(classes=CLASSES, length=SIDE * SIDE, side=SIDE)

    def describe(self) -> str:
        return f"CIFAR-10 in grey from {self.where}"

    def read(self, part: str) -> dict[str, Sequences]:
        of_file = "test" if part == "test" else "train"
        colours, labels = self._images(of_file)
        grey = np.rint(np.einsum("ncs,c->ns", colours.reshape(-1, 3, SIDE * SIDE), LUMINANCE)).clip(
            0, 255
        )
        ends = np.arange(len(labels) + 1, dtype=np.int64) * SIDE * SIDE
        found = Sequences(grey.astype(np.uint8).ravel(), ends, labels.astype(np.uint8))
        if of_file == "test":
            return {"test": found}
        return with_held_out(found, self.validation, self.seed)

    def _images(self, part: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the images of the split `part`, (N, 3 * 1024) uint8 with all red values first,
        then green and blue, and their labels (N,)."""
        given = self.given()
        if isinstance(given, str):
            table = datasets_library().load_dataset(given, split=part)
            colours = np.stack([np.asarray(image) for image in table["img"]]).transpose(0, 3, 1, 2)
            return colours.reshape(len(colours), WIDTH), np.array(table["label"])
        inner = given / "cifar-10-batches-bin"
        files = [(inner if inner.is_dir() else given) / name for name in _BATCHES[part]]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise UserError(
                f"{files[0].parent} has no {', '.join(missing)}: expected sequence.path to be a "
                "folder with CIFAR-10's binary version."
            )
        rows = np.concatenate(
            [np.fromfile(file, dtype=np.uint8).reshape(-1, WIDTH + 1) for file in files]
        )
        return rows[:, 1:], rows[:, 0]
