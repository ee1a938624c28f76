"""Small files that hold much: refused in one line, without taking the memory that they ask for."""

from __future__ import annotations

import gzip
import json
import lzma
import re
import tracemalloc
import zlib
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from flashtrain.data.labelled_documents import labelled_rows
from flashtrain.data.labelled_examples import word_rows
from flashtrain.data.sources import FilesSource
from flashtrain.data.text_files import MOST_VALUES, parquet_rows, parsed_line
from flashtrain.errors import UserError
from flashtrain.files.foreign_files import open_binary, read_whole
from flashtrain_recipes.arena.sequence_rows import local_rows
from flashtrain_recipes.arena.text import Retrieval

MIB = 2**20
COMPRESS = {"": lambda data: data, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


def told(path: Path, **options) -> str:
    with pytest.raises(UserError) as caught:
        for _ in FilesSource(path, **options).documents():
            pass
    return str(caught.value)


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_a_document_longer_than_the_setting_is_refused_by_file_and_setting(tmp_path, kind, suffix) -> None:
    path = tmp_path / f"a{kind}{suffix}"
    begin, end = (b'{"text": "', b'"}\n') if kind == ".jsonl" else (b"", b"")
    path.write_bytes(COMPRESS[suffix](begin + b"x" * (1000 - len(begin + end)) + end))
    assert len(list(FilesSource(path, longest_document=1000).documents())) == 1
    message = told(path, longest_document=999)
    assert message.startswith(f"{path}:")
    assert message.endswith("one document of more than 999 bytes of text; data.longest_document=... allows more.")


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_a_bomb_takes_little_more_memory_than_a_document_may(tmp_path, kind, suffix) -> None:
    path = tmp_path / f"a{kind}{suffix}"
    path.write_bytes(COMPRESS[suffix](bytes(64 * MIB)))
    assert path.stat().st_size < MIB
    tracemalloc.start()
    assert "one document of more than 4,194,304 bytes" in told(path, longest_document=4 * MIB)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 48 * MIB


def test_a_file_that_needs_much_memory_to_be_unpacked_is_refused(tmp_path) -> None:
    small = lzma.compress(b"words", preset=0)
    size = (small[12] + 1) * 4  # of the block's header, which says how large a dictionary it wants
    header = bytearray(small[12 : 12 + size - 4])
    header[header.index(b"\x21\x01") + 2] = 34  # 512 MiB
    wide = small[:12] + bytes(header) + zlib.crc32(header).to_bytes(4, "little") + small[12 + size :]
    # A frame with a window of 2**29 bytes, and one empty block.
    long = b"\x28\xb5\x2f\xfd\x00" + bytes([(29 - 10) << 3]) + b"\x01\x00\x00"
    for name, content, reason in (("a.txt.xz", wide, "[Mm]emory usage limit"), ("b.txt.zst", long, "memory")):
        path = tmp_path / name
        path.write_bytes(content)
        assert re.search(f"cannot read {path}: .*{reason}", told(path))


def test_many_empty_frames_are_read_to_the_end(tmp_path) -> None:
    for suffix in (".gz", ".xz", ".zst"):
        path = tmp_path / f"a.txt{suffix}"
        path.write_bytes(COMPRESS[suffix](b"") * 2000 + COMPRESS[suffix](b"end"))
        assert read_whole(path, 100) == b"end"


def test_padding_between_two_frames_of_xz_is_none_of_the_text(tmp_path) -> None:
    path = tmp_path / "a.txt.xz"
    path.write_bytes(lzma.compress(b"one ") + bytes(8) + lzma.compress(b"two") + bytes(4))
    with open_binary(path) as file:
        assert file.read() == b"one two"
    path.write_bytes(lzma.compress(b"one ") + b"junk")
    assert "cannot read" in told(path)


@pytest.mark.parametrize("line", [b"[" * 200_000, b'{"a":' * 200_000, b'{"text": ' + b"[" * 5000 + b"]" * 5000 + b"}"])
def test_a_line_that_is_nested_deeply_is_one_line(tmp_path, line) -> None:
    (tmp_path / "a.jsonl").write_bytes(line + b"\n")
    assert "a.jsonl:1: not a JSON object on a line: it is nested too deeply." in told(tmp_path)
    for read in (labelled_rows, word_rows):
        with pytest.raises(UserError, match="nested too deeply"):
            read(tmp_path)


def test_a_line_of_very_many_values_is_refused() -> None:
    with pytest.raises(UserError, match=r"a\.jsonl:3: more than 10,000,000 commas and brackets"):
        parsed_line(b"[" * (MOST_VALUES + 1), "a.jsonl:3")


def test_a_number_of_very_many_digits_is_one_line(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": ' + b"9" * 10_000 + b"}\n")
    assert "a.jsonl:1: not a JSON object on a line" in told(tmp_path)


def test_labelled_texts_that_are_kept_are_bounded_together(tmp_path, monkeypatch) -> None:
    row = json.dumps({"text": "x" * 100, "labels": [], "words": ["x"]})
    (tmp_path / "a.jsonl").write_text(f"{row}\n" * 20)
    monkeypatch.setattr("flashtrain.data.labelled_documents.MOST_BYTES", 1000)
    with pytest.raises(UserError, match=r"a\.jsonl:7: the labelled texts of .* are longer than 1,000 bytes together"):
        labelled_rows(tmp_path)


def test_a_long_line_of_pairs_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("flashtrain_recipes.arena.text.LONGEST_LINE", 100)
    (tmp_path / "x.train.tsv").write_text("1\ta\tb\tone\t" + "x" * 100)
    with pytest.raises(UserError, match=r"x\.train\.tsv:1: a line of more than 100 bytes"):
        Retrieval(tmp_path, cache_dir=tmp_path / "cache").split("train")


def test_a_long_text_that_many_parquet_rows_share_is_in_memory_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("flashtrain.files.foreign_files.DEFAULT_LONGEST", 2**40)  # so many rows are refused otherwise
    path = tmp_path / "a.parquet"
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 2000), pyarrow.array(["x" * 4 * MIB]))
    # Without Arrow's schema it is a plain column of text, which the file keeps as a dictionary.
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), path, compression="zstd", store_schema=False)
    before = pyarrow.total_allocated_bytes()
    peak = 0
    for number, row in enumerate(FilesSource(path).documents()):
        peak = max(peak, pyarrow.total_allocated_bytes() - before)
        assert len(row) == 4 * MIB
        if number == 300:
            break
    assert peak < 64 * MIB
    assert "one document of more than 1,000 bytes" in told(path, longest_document=1000)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.jsonl.zst"])
def test_many_fair_texts_in_far_too_small_a_file_are_refused(tmp_path, monkeypatch, name) -> None:
    monkeypatch.setattr("flashtrain.files.foreign_files.DEFAULT_LONGEST", MIB)
    monkeypatch.setattr("flashtrain.files.foreign_files.MOST_TIMES", 300)
    path = tmp_path / name
    texts = ["x" * 100_000] * 400
    if name.endswith("parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, compression="zstd")
    else:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        path.write_bytes(COMPRESS[path.suffix](lines.encode()))
    assert path.stat().st_size < 130_000
    message = told(path, longest_document=MIB)
    assert message.startswith(f"{path}: unpacks to more than 300 times its size")


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_text_that_repeats_itself_as_text_does_is_read(tmp_path, monkeypatch, suffix) -> None:
    monkeypatch.setattr("flashtrain.files.foreign_files.DEFAULT_LONGEST", 1000)
    path = tmp_path / f"a.jsonl{suffix}"
    lines = "".join(json.dumps({"text": f"{number} " + "the same words again, " * 20}) + "\n" for number in range(500))
    path.write_bytes(COMPRESS[suffix](lines.encode()))
    assert len(list(FilesSource(path).documents())) == 500


def test_texts_of_parquet_longer_than_the_setting_are_refused(tmp_path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["short"] * 100 + ["x" * 2000]}), path)
    assert len(list(FilesSource(path).documents())) == 101
    assert "one document of more than 1,999 bytes" in told(path, longest_document=1999)
    with pytest.raises(UserError, match=r"more than 10 bytes of text\.$"):
        list(parquet_rows(path, lambda schema: schema.names, longest=10))


def test_rows_of_parquet_have_their_plain_columns(tmp_path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": ["a", None], "label": [1, 0], "extra": [[1], [2]]})
    pyarrow.parquet.write_table(table, path)
    assert [row for row, _ in local_rows(path)] == [{"text": "a", "label": 1}, {"text": None, "label": 0}]
