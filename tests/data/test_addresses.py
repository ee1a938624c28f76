"""Text at an address that fsspec reads: the same documents as in a folder, and one line
for what cannot be read."""

from __future__ import annotations

import gzip
import json

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from flashtrain.command.compose import compose_settings
from flashtrain.data.text_files import FilesSource
from flashtrain.data.token_cache import open_or_build
from flashtrain.data.tokenizers import TokenizerSpec
from flashtrain.errors import UserError
from flashtrain.tasks.text_data import make_source


def test_a_json_list_is_answered_with_the_command_that_splits_it(tmp_path):
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(UserError, match=r"jq -c '\.\[\]'"):
        FilesSource(tmp_path / "a.json").files()


@pytest.fixture
def memory():
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


@pytest.fixture
def corpus(memory, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["four", "five"]}), tmp_path / "d.parquet")
    memory.pipe("/corpus/a.txt", b"one")
    memory.pipe("/corpus/b.jsonl", json.dumps({"text": "two"}).encode())
    memory.pipe("/corpus/c/c.txt.gz", gzip.compress(b"three"))
    memory.pipe("/corpus/d.parquet", (tmp_path / "d.parquet").read_bytes())
    memory.pipe("/corpus/.hidden.txt", b"no")
    memory.pipe("/corpus/picture.png", b"\x89PNG")
    return "memory://corpus"


def test_every_format_is_read_as_in_a_folder(corpus):
    assert list(FilesSource(corpus).documents()) == ["one", "two", "three", "four", "five"]
    assert list(FilesSource(f"{corpus}/b.jsonl").documents()) == ["two"]
    assert FilesSource(corpus).approximate_bytes() > 0
    read = f"files at {corpus}: 1 .txt, 1 .jsonl, 1 .gz, 1 .parquet"
    assert (
        FilesSource(corpus).describe()
        == f"{read} (left out, as no text, ignored or not data.files: 1 .png)"
    )
    source = make_source(
        compose_settings(["recipe=gpt2", "data=files", f"data.path={corpus}"]).data
    )
    cache = open_or_build(source, TokenizerSpec("bytes"))
    assert cache.documents == 5
    assert open_or_build(FilesSource(corpus), TokenizerSpec("bytes")).folder == cache.folder


def test_the_fingerprint_follows_what_the_file_system_says_of_the_content(corpus, memory):
    first = FilesSource(corpus).fingerprint()
    assert FilesSource(corpus).fingerprint() == first
    memory.pipe("/corpus/a.txt", b"eno")
    assert FilesSource(corpus).fingerprint() != first


def test_mistakes_name_the_address(corpus, memory, monkeypatch):
    def fails(address, message):
        with pytest.raises(UserError, match=message):
            list(FilesSource(address).documents())

    class Failed(Exception):
        pass

    def fail(*args, **options):
        raise Failed("throttled\nsecond line")

    fails("memory://nowhere", r"no readable file at data\.path=memory://nowhere")
    memory.pipe("/corpus/b.jsonl", b"{")
    fails(corpus, r"memory://.*b\.jsonl:1: .*JSON")
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "_open", fail)
    memory.rm("/corpus/picture.png")  # whose beginning would be read first
    fails(corpus, r"cannot read memory://.*a\.txt: throttled\.$")
