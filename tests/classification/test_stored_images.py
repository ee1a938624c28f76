"""Answers to images that lie in a file: counted, beside the papers where the task's own program drew them."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from flashtrain.errors import UserError
from flashtrain.models.classifier import Classifier
from flashtrain.models.classifier_config import ClassifierConfig
from flashtrain.report.rows import read_result
from flashtrain_recipes.arena.stored_images import correct_answers, main, read_images
from flashtrain_recipes.arena.weights import SavedClassifier, write_classifier

SIDE = 32


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier that answers 1 to whatever it is shown."""
    config = ClassifierConfig(classes=2, length=SIDE * SIDE, embed=8, layers=1, heads=1, ffn=8, side=SIDE,
                              inputs="grey", positions="axial", grey_bins=4)  # fmt: skip
    model = Classifier(config, attention="sdpa")
    with torch.no_grad():
        model.head[2].weight.zero_()
        model.head[2].bias.copy_(torch.tensor([0.0, 1.0]))
    notes = {"task": "classification", "recipe": "pathx", "data": "pathfinder", "contour": "hard", "step": 1}
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    write_classifier(SavedClassifier(config, model.state_dict(), notes, path), path, precision="float32")
    return path


def images_file(folder: Path, labels: list[int], side: int = SIDE) -> Path:
    images = np.random.RandomState(0).randint(0, 256, (len(labels), side, side)).astype(np.uint8)
    np.savez(folder / "images.npz", x=images, y=np.array(labels, dtype=np.uint8))
    return folder / "images.npz"


def test_its_row_says_how_many_are_right_of_which_images(weights: Path, tmp_path: Path, capsys) -> None:
    file, saved = images_file(tmp_path, [1, 1, 0, 1, 0]), tmp_path / "result.json"
    for first in ("5", "2"):
        words = [str(weights), str(file), "--images", "original", "--first", first, "--save", str(saved)]
        assert main(words) == 0
    assert "(paper)" in capsys.readouterr().out
    result = read_result(saved)
    assert [(row["correct"], row["samples"], row["images"]) for row in result.rows] == [
        (3, 5, "original"), (2, 2, "original")
    ]  # fmt: skip
    assert result.command.count("stored_images") == 2


def test_images_of_another_program_do_not_stand_beside_the_papers(weights: Path, tmp_path: Path, capsys) -> None:
    assert main([str(weights), str(images_file(tmp_path, [1, 0])), "--images", "mine"]) == 0
    assert "(paper)" not in capsys.readouterr().out


def test_images_of_another_side_are_refused(weights: Path, tmp_path: Path, capsys) -> None:
    assert main([str(weights), str(images_file(tmp_path, [1], side=24)), "--images", "original"]) == 2
    assert "reads images of 1,024 pixels, and these have 576" in capsys.readouterr().err


def archive(**arrays: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


X, Y = np.zeros((2, 8, 8), dtype=np.uint8), np.zeros(2, dtype=np.uint8)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04",
        archive(x=X),
        archive(x=X.astype(np.float32), y=Y),
        archive(x=X[:, :4], y=Y),
        archive(x=X, y=Y[:1]),
        archive(x=X, y=Y + 2),
        archive(x=X[:0], y=Y[:0]),
        archive(x=np.array([object()]), y=Y),
    ],
)
def test_a_file_without_such_images_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.npz") as caught:
        read_images(tmp_path / "x.npz")
    assert "\n" not in str(caught.value)


def test_a_file_of_gigabytes_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashtrain_recipes.arena.stored_images.MOST_BYTES", 10)
    with pytest.raises(UserError, match="at most 10 are read"):
        read_images(images_file(tmp_path, [1]))
    assert zipfile.is_zipfile(tmp_path / "images.npz")


def test_every_batch_is_counted(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashtrain_recipes.arena.weights import read_classifier

    monkeypatch.setattr("flashtrain_recipes.arena.stored_images._LONGEST_BATCH", 2 * SIDE * SIDE)
    labels = torch.tensor([1, 0, 1, 1, 0])
    assert correct_answers(read_classifier(weights), torch.zeros(5, SIDE * SIDE, dtype=torch.uint8), labels) == 3
