"""Pathfinder images from files: the original program's folders, the Long
Range Arena's, and .npz."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flashtrain.errors import UserError
from flashtrain_recipes.arena.pathfinder.image_files import PathfinderFiles

SIDE, COUNT = 32, 20


def picture(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (SIDE, SIDE), dtype=np.uint8)


def write_folder(folder: Path, *, array: bool = False, count: int = COUNT, first: int = 0) -> Path:
    """Images number `first` on, of which the odd ones are joined."""
    (folder / "imgs" / "1").mkdir(parents=True)
    (folder / "metadata").mkdir()
    rows = []
    for number in range(first, first + count):
        name = f"sample_{number}.png"
        Image.fromarray(picture(number)).save(folder / "imgs" / "1" / name)
        rows.append(["imgs/1", name, str(number), str(number % 2), "1.0", "14", "4"])
    table = folder / "metadata" / "1.npy"
    if array:
        np.save(table, np.array(rows), allow_pickle=False)
    else:
        table.write_text("".join(" ".join(row) + "\n" for row in rows))
    return folder


def pixels_and_labels(source: PathfinderFiles, *splits: str) -> dict[bytes, int]:
    found = {}
    for name in splits:
        samples = source.split(name)
        batch = samples[list(range(len(samples)))]
        found.update(
            {
                row.numpy().tobytes(): int(label)
                for row, label in zip(batch["tokens"], batch["labels"], strict=True)
            }
        )
    return found


EXPECTED = {picture(number).tobytes(): number % 2 for number in range(COUNT)}


@pytest.mark.parametrize(
    "array", [True, False], ids=["the program's metadata", "the Arena's metadata"]
)
def test_every_image_of_a_folder_is_in_one_split_with_its_label(
    tmp_path: Path, array: bool
) -> None:
    source = PathfinderFiles(write_folder(tmp_path, array=array), SIDE)
    source.prepare()
    assert [len(source.split(name)) for name in ("train", "validation", "test")] == [16, 2, 2]
    assert pixels_and_labels(source, "train", "validation", "test") == EXPECTED
    assert source.shape.length == SIDE * SIDE


@pytest.mark.parametrize(
    "inner", ["", "pathfinder32/curv_contour_length_14", "curv_contour_length_14", "pathfinder32"]
)
def test_side_and_contour_find_their_folder(tmp_path: Path, inner: str) -> None:
    write_folder(tmp_path / inner)
    write_folder(tmp_path / "pathfinder32/curv_baseline", first=100)
    source = PathfinderFiles(tmp_path, SIDE)
    assert pixels_and_labels(source, "train", "validation", "test") == EXPECTED


def test_joined_and_separate_contours_may_lie_in_two_folders(tmp_path: Path) -> None:
    write_folder(tmp_path / "curv_contour_length_9", count=10)
    write_folder(tmp_path / "curv_contour_length_9_neg", count=10, first=10)
    source = PathfinderFiles(tmp_path, SIDE, contour="intermediate")
    assert pixels_and_labels(source, "train", "validation", "test") == EXPECTED


def test_an_npz_holds_images_and_labels_and_all_of_them_may_be_for_testing(tmp_path: Path) -> None:
    images = np.stack([picture(number) for number in range(COUNT)])
    np.savez(tmp_path / "images.npz", x=images, y=np.arange(COUNT) % 2)
    source = PathfinderFiles(tmp_path / "images.npz", SIDE, test=COUNT)
    assert pixels_and_labels(source, "test") == EXPECTED
    with pytest.raises(UserError, match="must leave some to train on"):
        source.split("train")


def test_the_seed_decides_what_is_held_out(tmp_path: Path) -> None:
    write_folder(tmp_path)
    held_out = [
        pixels_and_labels(PathfinderFiles(tmp_path, SIDE, seed=seed), "test") for seed in (0, 0, 1)
    ]
    assert held_out[0] == held_out[1] != held_out[2]


def test_files_without_a_byte_are_left_out(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "imgs/1/sample_3.png").write_bytes(b"")
    assert "19 images" in PathfinderFiles(tmp_path, SIDE).describe()


def large_png(folder: Path) -> None:
    for path in (folder / "imgs/1").iterdir():
        Image.fromarray(np.zeros((64, 64), np.uint8)).save(path)


def line(text: str):
    return lambda folder: (folder / "metadata/1.npy").write_text(text)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (large_png, "64 x 64 pixels"),
        (line("imgs/1 sample_0.png 0 7\n"), "line 1"),
        (line(""), "no images"),
    ],
)
def test_what_is_wrong_with_a_folder_is_one_line(tmp_path: Path, spoil, told: str) -> None:
    spoil(write_folder(tmp_path))
    with pytest.raises(UserError, match=told):
        PathfinderFiles(tmp_path, SIDE).prepare()


@pytest.mark.parametrize(
    "arrays",
    [
        {"x": np.zeros((4, 16, 16), np.uint8), "y": np.zeros(4)},
        {"x": np.zeros((4, 32, 32), np.uint8), "y": np.full(4, 2)},
    ],
)
def test_an_npz_of_anything_else_is_one_line(tmp_path: Path, arrays) -> None:
    np.savez(tmp_path / "images.npz", **arrays)
    with pytest.raises(UserError, match="x must be"):
        PathfinderFiles(tmp_path / "images.npz", SIDE).prepare()


def test_a_folder_without_images_says_what_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "pathfinder64").mkdir()
    with pytest.raises(UserError, match="called pathfinder32"):
        PathfinderFiles(tmp_path, SIDE).prepare()
