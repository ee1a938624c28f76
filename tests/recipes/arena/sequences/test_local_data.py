"""Text, Retrieval and Image from local folders, and one clear line where they are
missing or something else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from flashtrain.errors import UserError
from flashtrain_recipes.arena.image import GreyImages
from flashtrain_recipes.arena.papers import PaperPairs
from flashtrain_recipes.arena.reviews import Reviews


def reviews(folder: Path) -> Path:
    for part in ("train", "test"):
        for name in ("neg", "pos"):
            (folder / part / name).mkdir(parents=True)
            for number in range(6):
                (folder / part / name / f"{number}.txt").write_text(f"{name} film {number} é")
    return folder


def test_reviews_are_read_from_folders_of_text_files(tmp_path) -> None:
    source = Reviews(reviews(tmp_path), length=64, validation=4)
    counts = {split: len(source.split(split)) for split in ("train", "validation", "test")}
    assert counts == {"train": 8, "validation": 4, "test": 12}
    for split in counts:
        batch = source.split(split)[list(range(counts[split]))]
        for row, length, label in zip(
            batch["tokens"], batch["lengths"], batch["labels"].tolist(), strict=True
        ):
            text = bytes(row[:length].tolist()).decode()
            assert text.startswith("pos" if label else "neg")
            assert text.endswith("é")


def test_the_first_reviews_of_what_is_held_out_are_of_both_kinds(tmp_path) -> None:
    for part in ("train", "test"):
        rows = [{"text": f"film {number}", "label": number // 100} for number in range(200)]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    source = Reviews(tmp_path, length=64, validation=80)
    for split in ("validation", "test"):
        first = source.split(split)[list(range(24))]["labels"]
        assert 4 < int(first.sum()) < 20


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_all_shards_of_a_table_are_read(tmp_path, suffix) -> None:
    names = ["train-00001-of-00002", "train-00000-of-00002", "test-00000-of-00001"]
    for part, first in zip(names, (3, 0, 6), strict=True):
        rows = [{"text": f"film {first + number}", "label": 0} for number in range(3)]
        file = tmp_path / f"{part}.{suffix}"
        if suffix == "jsonl":
            file.write_text("\n".join(json.dumps(row) for row in rows))
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    source = Reviews(tmp_path, length=64, validation=1)
    found = [
        bytes(row[:6].tolist())
        for split in ("train", "validation")
        for row in source.split(split).sequences.tokens.reshape(-1, 6)
    ]
    assert sorted(found) == [f"film {number}".encode() for number in range(6)]


def test_a_label_that_is_none_is_named_by_its_line(tmp_path) -> None:
    (tmp_path / "train.jsonl").write_text(
        '{"text": "a film", "label": 1}\n\n{"text": "a film", "label": 5}\n'
    )
    with pytest.raises(UserError, match=r"train\.jsonl:3: .*5"):
        Reviews(tmp_path).split("train")


def test_pairs_are_read_from_the_arenas_files_in_the_order_of_their_names(tmp_path) -> None:
    for number in (2, 1):
        line = f"1.0\ta1\ta2\tpaper {number}\tanother paper\n0.0\ta1\ta3\tone paper\tnone\n"
        (tmp_path / f"{number}.eval.tsv").write_text(line)
    source = PaperPairs(tmp_path, length=64)
    batch = source.split("validation")[[0, 1, 2, 3]]
    assert batch["labels"].tolist() == [1, 0, 1, 0]
    assert batch["lengths"].tolist() == [[7, 13], [9, 4]] * 2
    assert [bytes(row[0, :7].tolist()) for row in batch["tokens"][::2]] == [b"paper 1", b"paper 2"]
    assert source.shape.towers == 2


@pytest.mark.parametrize("line", ["1\ta\tb\tonly one text\n", "7\ta\tb\tone text\tanother\n"])
def test_a_line_of_another_form_is_named(tmp_path, line) -> None:
    (tmp_path / "x.train.tsv").write_text(line)
    with pytest.raises(UserError, match=r"x\.train\.tsv:1: "):
        PaperPairs(tmp_path).split("train")


def test_images_are_read_in_grey(tmp_path) -> None:
    random = np.random.RandomState(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        colours = random.randint(0, 256, (4, 3072)).astype(np.uint8)
        colours[0] = np.repeat(np.array([255, 0, 0], dtype=np.uint8), 1024)  # a red one
        rows = np.concatenate([np.array([3, 0, 9, 1], dtype=np.uint8)[:, None], colours], axis=1)
        (tmp_path / f"{name}.bin").write_bytes(rows.tobytes())
    source = GreyImages(tmp_path, validation=5)
    batch = source.split("test")[[0, 1, 2, 3]]
    assert batch["labels"].tolist() == [3, 0, 9, 1]
    assert batch["tokens"].shape == (4, 1024)
    assert "lengths" not in batch
    assert set(batch["tokens"][0].tolist()) == {76}  # 0.2989 * 255
    assert len(source.split("train")) == 15
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(UserError, match=r"has no data_batch_3\.bin"):
        GreyImages(tmp_path).split("train")


def test_too_few_reviews_name_the_setting_that_holds_some_out(tmp_path) -> None:
    with pytest.raises(
        UserError, match=r"12 training samples are too few .*sequence\.validation=2000"
    ):
        Reviews(reviews(tmp_path)).split("train")


@pytest.mark.parametrize("make", [Reviews, PaperPairs, GreyImages])
def test_missing_data_is_one_line_that_says_what_to_give(make, tmp_path) -> None:
    with pytest.raises(UserError, match=r"sequence\.path=FOLDER"):
        make(None).split("train")
    with pytest.raises(UserError, match="is no folder"):
        make(tmp_path / "nowhere").split("train")
