"""What a classifier's weights answer to images that lie in a file, of another program than our generator:

python -m flashtrain_recipes.arena.stored_images WEIGHTS.safetensors IMAGES.npz --images original --save RESULT.json

IMAGES.npz holds x, (N, side, side) uint8, and y, (N,) the labels. The answers are counted on the CPU, in float32.
N images, B of a batch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.files.foreign_files import MIB
from flashtrain.models.classifier import Classifier
from flashtrain.models.classifier_growth import carry_weights
from flashtrain.report.rows import Row, read_result, write_result
from flashtrain_recipes.arena.intervals import wilson
from flashtrain_recipes.arena.pathfinder.image_files import read_archive
from flashtrain_recipes.arena.published import ORIGINAL
from flashtrain_recipes.arena.tables import accuracy_table
from flashtrain_recipes.arena.weights import SavedClassifier, read_classifier

MOST_BYTES = 1024 * MIB
_LONGEST_BATCH = 65536  # pixels at once: memory of a CPU


def read_images(path: str | Path) -> tuple[Tensor, Tensor]:
    """Images (N, side * side) uint8 and labels (N,) int64. Raises UserError for a file that holds none."""
    images, labels = read_archive(Path(path), most=MOST_BYTES)
    return torch.from_numpy(images).flatten(1), torch.from_numpy(labels.astype(np.int64))


@torch.no_grad()
def correct_answers(saved: SavedClassifier, images: Tensor, labels: Tensor) -> int:
    """How many of the images (N, S) the model labels as `labels` (N,) do. Raises UserError for images of another side
    than the weights."""
    if images.shape[1] != saved.config.length or saved.config.classes != 2:
        raise UserError(
            f"{saved.path} reads images of {saved.config.length:,} pixels, and these have {images.shape[1]:,}."
        )
    model = Classifier(saved.config, attention="sdpa")
    carry_weights(model, saved.config, saved.state)
    model.eval()
    size = max(1, _LONGEST_BATCH // images.shape[1])
    pairs = zip(images.split(size), labels.split(size), strict=True)
    return sum(int((model(some).argmax(dim=1) == label).sum()) for some, label in pairs)


def image_row(weights: str | Path, path: str | Path, *, images: str, first: int | None = None) -> Row:
    """A row as mode=evaluate's. images: what the file's images are, ORIGINAL where the task's own program drew them.
    first: so many of them."""
    began = time.monotonic()
    saved = read_classifier(weights)
    pixels, labels = (values[:first] for values in read_images(path))
    correct, total = correct_answers(saved, pixels, labels), len(labels)
    low, high = wilson(correct, total)
    return {
        "implementation": "flashtrain",
        "task": "pathfinder",
        "side": saved.config.side,
        "contour": "hard",
        "images": images,
        "samples": total,
        "correct": correct,
        "accuracy": round(correct / total, 5),
        "accuracy_low": round(low, 5),
        "accuracy_high": round(high, 5),
        "parameters": sum(value.numel() for value in saved.state.values()),
        "weights": Path(weights).name,
        "seconds": round(time.monotonic() - began, 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m flashtrain_recipes.arena.stored_images", description=__doc__)
    parser.add_argument("weights", metavar="WEIGHTS.safetensors")
    parser.add_argument("file", metavar="IMAGES.npz")
    parser.add_argument("--images", required=True, help=f"{ORIGINAL}: the task's own program drew them; or a name")
    parser.add_argument("--first", type=int, metavar="N", help="only the first so many")
    parser.add_argument("--save", type=Path, metavar="RESULT.json", help="write the row there, or add it")
    given = parser.parse_args(arguments)
    try:
        row = image_row(given.weights, given.file, images=given.images, first=given.first)
        accuracy_table([row]).print()
        if given.save:
            _save(given.save, row, given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _save(path: Path, row: Row, given: argparse.Namespace) -> None:
    words = [given.weights, Path(given.file).name, f"--images {given.images}"]
    words += [] if given.first is None else [f"--first {given.first}"]
    command = " ".join(["python -m flashtrain_recipes.arena.stored_images", *words])
    before = read_result(path) if path.is_file() else None
    rows = [*(before.rows if before else []), row]
    write_result(path, "pathx", f"{before.command}; {command}" if before else command, rows)
    print(f"rows: {path}")


if __name__ == "__main__":
    sys.exit(main())
