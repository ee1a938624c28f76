"""Local files of text, compressed or not, and what is said about those that cannot be read."""

from __future__ import annotations

import gzip
import json
import os

import pyarrow
import pyarrow.parquet
import pytest

from flashtrain.data.sources import FilesSource
from flashtrain.errors import UserError
from flashtrain.files import content_hashes


def read(path, **options):
    return list(FilesSource(path, **options).documents())


def told(path, **options) -> str:
    with pytest.raises(UserError) as error:
        read(path, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_rows_without_a_text_are_no_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one", "n": 1}\n\n{"text": null}\n{"text": "zwei \\u00fc"}\n')
    assert read(tmp_path / "a.jsonl") == ["one", "zwei ü"]


def test_parquet_rows_are_documents(tmp_path):
    table = pyarrow.table({"text": ["one", None, "two"], "author": ["a", "b", "c"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ["one", "two"]
    assert read(tmp_path, text_column="author") == ["a", "b", "c"]


def test_a_folder_is_read_with_its_subfolders_in_order_of_paths_without_hidden_or_other_files(tmp_path):
    for name in ("b.txt", "a/z.MD", "a/b/c.txt.gz", ".hidden.txt", ".git/x.txt", "picture.png", "table.parquet.gz"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(name.encode()) if name.endswith(".gz") else name.encode())
    assert read(tmp_path) == ["a/b/c.txt.gz", "a/z.MD", "b.txt"]


def test_linked_folders_are_followed_once(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("a")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "loop").symlink_to(tmp_path / "corpus")
    assert read(tmp_path / "corpus") == ["a"]


def test_the_fingerprint_follows_names_contents_and_the_column_but_neither_times_nor_the_folders_place(
    tmp_path, monkeypatch
):
    folder = tmp_path / "corpus"
    folder.mkdir()
    path = folder / "a.txt"
    path.write_text("hello")
    first = FilesSource(folder).fingerprint()
    assert FilesSource(folder).fingerprint() == first
    assert FilesSource(folder, text_column="body").fingerprint() != first
    os.utime(path, ns=(1, 1))
    assert FilesSource(folder).fingerprint() == first
    path.write_text("hullo")
    os.utime(path, ns=(1, 1))  # of the same size and time
    changed = FilesSource(folder).fingerprint()
    assert changed != first
    folder.rename(tmp_path / "moved")
    assert FilesSource(tmp_path / "moved").fingerprint() == changed
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("moved")
    for spelled in ("moved", "./moved/", "moved/../moved", "link"):
        assert FilesSource(spelled).fingerprint() == changed
    (tmp_path / "moved" / "b.txt").write_text("x")
    assert FilesSource(tmp_path / "moved").fingerprint() != changed


def test_a_file_is_read_once_for_its_fingerprint(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.txt").write_text("hello")
    first = FilesSource(tmp_path).fingerprint()
    read, hashed = content_hashes._hash, []
    monkeypatch.setattr(content_hashes, "_hash", lambda path: hashed.append(path.name) or read(path))
    assert FilesSource(tmp_path).fingerprint() == first
    assert hashed == []
    (tmp_path / "b.txt").write_text("hullo")
    assert FilesSource(tmp_path).fingerprint() != first
    assert hashed == ["b.txt"]


def test_the_size_estimate_counts_compressed_files_as_more_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 1000)
    assert FilesSource(tmp_path).approximate_bytes() == 1000
    (tmp_path / "b.txt.gz").write_bytes(b"x" * 1000)
    assert FilesSource(tmp_path).approximate_bytes() > 2000


def test_a_missing_path_is_named(tmp_path):
    (tmp_path / "somewhere").mkdir()
    message = told(tmp_path / "nowhere")
    assert f"no file or folder {tmp_path / 'nowhere'}" in message
    assert f"Did you mean {tmp_path / 'somewhere'}?" in message


def test_a_folder_or_file_that_is_not_read_says_which_formats_are(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    for path in (tmp_path, tmp_path / "a.png"):
        message = told(path)
        for suffix in (".txt", ".md", ".jsonl", ".parquet", ".gz", ".xz", ".zst"):
            assert suffix in message


def test_a_missing_column_says_which_exist(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x", "title": "y"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "n": [1]}), tmp_path / "b.parquet")
    assert "a.jsonl:1: no column 'text'. Possible: body, title" in told(tmp_path / "a.jsonl")
    assert "no column 'text'. Possible: body, n" in told(tmp_path / "b.parquet")


def test_a_column_that_is_not_text_is_named_with_what_it_holds(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": 3}\n')
    pyarrow.parquet.write_table(pyarrow.table({"n": [1]}), tmp_path / "b.parquet")
    assert "a.jsonl:1: 'text' holds a JSON number, not text" in told(tmp_path / "a.jsonl")
    assert "column 'n' holds int64, not text" in told(tmp_path / "b.parquet", text_column="n")


@pytest.mark.parametrize("line", [b"{not json}", b'["a list"]', b'{"text": "cut'])
def test_a_malformed_jsonl_line_is_named_by_file_and_line(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps({"text": "fine"}).encode() + b"\n" + line + b"\n")
    assert "a.jsonl:2:" in told(path)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.xz", "a.txt.zst", "a.parquet"])
def test_a_file_that_is_not_what_its_name_says_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"this is no such file")
    assert name in told(tmp_path)
