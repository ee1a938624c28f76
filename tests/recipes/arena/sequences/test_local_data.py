"""Text, Retrieval and Image from local folders, and one clear line where they are missing or something else."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from flashtrain.errors import UserError
from flashtrain_recipes.arena.image import GreyImages
from flashtrain_recipes.arena.text import ByteText, Retrieval


def reviews(folder: Path) -> Path:
    for part in ("train", "test"):
        for name in ("neg", "pos"):
            (folder / part / name).mkdir(parents=True)
            for number in range(6):
                (folder / part / name / f"{number}.txt").write_text(f"{name} film {number} é")
    return folder


def test_reviews_are_read_from_folders_of_text_files(tmp_path) -> None:
    source = ByteText(reviews(tmp_path / "data"), length=64, validation=4, cache_dir=tmp_path / "cache")
    counts = {split: len(source.split(split)) for split in ("train", "validation", "test")}
    assert counts == {"train": 8, "validation": 4, "test": 12}
    for split in counts:
        batch = source.split(split)[list(range(counts[split]))]
        for row, length, label in zip(batch["tokens"], batch["lengths"], batch["labels"].tolist(), strict=True):
            text = bytes(row[:length].tolist()).decode()
            assert text.startswith("pos" if label else "neg")
            assert text.endswith("é")


def test_the_first_reviews_of_what_is_held_out_are_of_both_kinds(tmp_path) -> None:
    for part in ("train", "test"):
        rows = [{"text": f"film {number}", "label": number // 100} for number in range(200)]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    source = ByteText(tmp_path, length=64, validation=80, cache_dir=tmp_path / "cache")
    for split in ("validation", "test"):
        first = source.split(split)[list(range(24))]["labels"]
        assert 4 < int(first.sum()) < 20


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_all_shards_of_a_table_are_read_in_the_order_of_their_names(tmp_path, suffix) -> None:
    names = ["train-00001-of-00002", "train-00000-of-00002", "test-00000-of-00001"]
    for part, first in zip(names, (3, 0, 6), strict=True):
        rows = [{"text": f"film {first + number}", "label": 0} for number in range(3)]
        file = tmp_path / f"{part}.{suffix}"
        if suffix == "jsonl":
            file.write_text("\n".join(json.dumps(row) for row in rows))
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    train = ByteText(tmp_path, length=64, validation=1, cache_dir=tmp_path / "cache")._opened("train")
    assert bytes(train.tokens).decode() == "".join(f"film {number}" for number in range(6))
    (tmp_path / f"train-00001-of-00002.{suffix}").unlink()
    with pytest.raises(UserError, match="has 1 of the 2 files of train; number 1 is missing"):
        ByteText(tmp_path, length=64, validation=1, cache_dir=tmp_path / "cache")._opened("train")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{'text': 1}", "JSON"), ("[1]", "list"), ('{"text": "a film", "label": 5}', "label 5"),
        ('{"text": "a film"}', "sentiment"),
    ],
)  # fmt: skip
def test_a_line_of_a_table_that_cannot_be_read_is_named_by_its_own_number(tmp_path, line, word) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"text": "a film", "label": 1}\n\n' + line + "\n")
    with pytest.raises(UserError, match=rf"train\.jsonl:3: .*{word}"):
        ByteText(tmp_path, cache_dir=tmp_path / "cache").prepare()


def test_pairs_are_read_from_the_arenas_files(tmp_path) -> None:
    for part in ("train", "eval", "test"):
        line = "1.0\ta1\ta2\tone paper\tanother paper\n0.0\ta1\ta3\tone paper\tnone\n"
        (tmp_path / f"new_aan_pairs.{part}.tsv").write_text(line)
    source = Retrieval(tmp_path, length=64, cache_dir=tmp_path / "cache")
    source.prepare()
    batch = source.split("validation")[[0, 1]]
    assert batch["labels"].tolist() == [1, 0]
    assert batch["lengths"].tolist() == [[9, 13], [9, 4]]
    assert source.shape.towers == 2


def test_pairs_of_several_files_are_read_in_the_order_of_their_names(tmp_path) -> None:
    for number in (2, 1):
        (tmp_path / f"{number}.train.tsv").write_text(f"1\ta\tb\tpaper {number}\tother\n")
    first, second = Retrieval(tmp_path, length=64, cache_dir=tmp_path / "cache").split("train")[[0, 1]]["tokens"][:, 0]
    assert (bytes(first[:7].tolist()), bytes(second[:7].tolist())) == (b"paper 1", b"paper 2")


def test_a_line_of_another_form_is_named(tmp_path) -> None:
    (tmp_path / "x.train.tsv").write_text("1\ta\tb\tonly one text\n")
    with pytest.raises(UserError, match=r"x\.train\.tsv:1: 4 fields"):
        Retrieval(tmp_path, cache_dir=tmp_path / "cache").split("train")


@pytest.mark.parametrize("version", ["python", "binary"])
def test_images_are_read_in_grey_from_both_versions(tmp_path, version) -> None:
    random = np.random.RandomState(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        colours = random.randint(0, 256, (4, 3072)).astype(np.uint8)
        colours[0] = np.repeat(np.array([255, 0, 0], dtype=np.uint8), 1024)  # a red one
        labels = [3, 0, 9, 1]
        if version == "python":
            (tmp_path / name).write_bytes(pickle.dumps({b"data": colours, b"labels": labels}))
        else:
            rows = np.concatenate([np.array(labels, dtype=np.uint8)[:, None], colours], axis=1)
            (tmp_path / f"{name}.bin").write_bytes(rows.tobytes())
    source = GreyImages(tmp_path, validation=5, cache_dir=tmp_path / "cache")
    batch = source.split("test")[[0, 1, 2, 3]]
    assert batch["labels"].tolist() == [3, 0, 9, 1]
    assert batch["tokens"].shape == (4, 1024)
    assert "lengths" not in batch
    assert set(batch["tokens"][0].tolist()) == {76}  # 0.2989 * 255
    assert len(source.split("train")) == 15


def test_only_the_missing_batches_are_named(tmp_path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for number in (1, 2, 4):
        (folder / f"data_batch_{number}.bin").touch()
    (tmp_path / "data_batch_1").touch()  # of the other version, further from whole
    with pytest.raises(UserError) as caught:
        GreyImages(tmp_path, cache_dir=tmp_path / "cache").prepare()
    assert str(caught.value) == f"{folder} has no data_batch_3.bin, data_batch_5.bin of CIFAR-10."


def test_too_few_reviews_name_the_setting_that_holds_some_out(tmp_path) -> None:
    with pytest.raises(UserError, match=r"12 training samples are too few .*sequence\.validation=2000"):
        ByteText(reviews(tmp_path / "data"), cache_dir=tmp_path / "cache").prepare()


class Evil:
    def __reduce__(self):
        return print, ("ran",)


def test_a_pickle_that_could_run_code_is_refused(tmp_path, capsys) -> None:
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (tmp_path / name).write_bytes(pickle.dumps({b"data": Evil()}))
    with pytest.raises(pickle.UnpicklingError, match="could run code"):
        GreyImages(tmp_path, cache_dir=tmp_path / "cache").prepare()
    assert "ran" not in capsys.readouterr().out


@pytest.mark.parametrize("make", [ByteText, Retrieval, GreyImages])
def test_missing_data_is_one_line_that_says_what_to_give(make, tmp_path) -> None:
    with pytest.raises(UserError, match=r"sequence\.path=FOLDER") as caught:
        make(None)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError):
        make(tmp_path / "nowhere", cache_dir=tmp_path / "cache").prepare()
