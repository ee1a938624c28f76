"""The token file on disk: found again, checked, written in little memory, and never half there."""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import wait_for

from flashtrain.data import token_cache
from flashtrain.data.token_cache import MappedTokens, TokenFile, open_or_build
from flashtrain.data.tokenizers import ByteTokenizer, TokenizerSpec
from flashtrain.errors import UserError

ROOT = Path(__file__).parents[2]
BYTES = TokenizerSpec("bytes")


def left_behind(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


def test_every_document_lies_between_its_offsets_closed_by_end_of_text(list_source, tmp_path):
    source = list_source(["ab", "", "c", "ü"])
    cache = open_or_build(source, BYTES, tmp_path)
    assert cache.tokens[:].tolist() == [97, 98, 256, 99, 256, 0xC3, 0xBC, 256]
    assert cache.offsets.tolist() == [0, 3, 5, 8]
    assert (cache.tokens[:].dtype, cache.offsets.dtype, cache.documents) == (np.uint16, np.int64, 3)
    assert isinstance(cache.tokenizer, ByteTokenizer)
    meta = json.loads((cache.folder / "meta.json").read_text())
    assert meta["source"] == "a list of texts"
    assert (meta["tokens"], meta["documents"], meta["dtype"]) == (8, 3, "uint16")
    assert {"tokens.bin", "documents.npy", "tokenizer"} < {
        path.name for path in cache.folder.iterdir()
    }

    tokenizer = ByteTokenizer()
    tokenizer.vocab_size, tokenizer.end_of_text = 70_000, 69_999
    wide = open_or_build(list_source(["a"]), tokenizer, tmp_path).tokens[:]
    assert (wide.dtype, wide.tolist()) == (np.uint32, [97, 69_999])


def test_several_files_are_one_array_that_travels_without_them(tmp_path):
    files = []
    for number, (size, dtype) in enumerate([(3, "uint16"), (1, "int64"), (5000, "uint32")]):
        np.arange(size, dtype=dtype).tofile(tmp_path / f"{number}.bin")
        files.append(TokenFile(tmp_path / f"{number}.bin", dtype, 0, size))
    tokens, whole = MappedTokens(files), np.concatenate([np.arange(3), [0], np.arange(5000)])
    for begin, end in [(0, 3), (1, 4), (2, 9), (3, 4), (4, 5004), (0, 5004), (5003, 6000)]:
        assert tokens[begin:end].tolist() == whole[begin:end].tolist()
    sent = pickle.dumps(tokens)
    assert len(sent) < 2000
    assert np.array_equal(pickle.loads(sent), whole)


def test_an_unchanged_source_is_read_once_and_lies_in_the_default_folder(list_source, cache_home):
    source = list_source(["text"])
    first = open_or_build(source, BYTES)
    second = open_or_build(list_source(["text"]), BYTES)
    assert first.folder == second.folder
    assert first.folder.parent == cache_home
    assert source.readings == 1


def test_a_changed_source_or_tokenizer_is_another_cache_and_each_has_the_name_it_always_had(
    list_source, tmp_path
):
    cases = [
        ("text", BYTES),
        ("text!", BYTES),
        *(("text", TokenizerSpec("bpe", vocab_size=size)) for size in (258, 259)),
    ]
    folders = {
        open_or_build(list_source([text]), spec, tmp_path).folder.name for text, spec in cases
    }
    assert len(folders) == 4
    assert "bytes-497f6ab1e7b6" in folders


def test_documents_are_read_in_groups_of_bounded_size_that_do_not_change_the_tokens(
    list_source, tmp_path, monkeypatch
):
    texts = [f"text {number}" for number in range(50)]
    spec = TokenizerSpec("bpe", vocab_size=270)
    at_once = open_or_build(list_source(texts), spec, tmp_path / "a")
    monkeypatch.setattr(token_cache, "GROUP_CHARACTERS", 10)
    in_groups = open_or_build(list_source(texts), spec, tmp_path / "b")
    assert at_once.tokens[:].tolist() == in_groups.tokens[:].tolist()
    assert at_once.offsets.tolist() == in_groups.offsets.tolist()
    groups = list(token_cache.grouped(["aaaa", "bbbb", "cccc", "d" * 30, "e"], len))
    assert groups == [["aaaa", "bbbb", "cccc"], ["d" * 30], ["e"]]
    monkeypatch.setattr(token_cache, "GROUP_DOCUMENTS", 2)
    assert list(token_cache.grouped("abc", len)) == [["a", "b"], ["c"]]


def test_a_build_that_fails_leaves_nothing_and_the_next_one_works(list_source, tmp_path):
    class Failing(list_source):
        error = None

        def documents(self):
            yield "fine"
            if self.error:
                raise self.error

    source = Failing(["fine"])
    for source.error, message in (
        (UserError("line 2 is no text"), "line 2 is no text"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            f"cannot write .*{tmp_path}: No space left .*data.cache_dir",
        ),
    ):
        with pytest.raises(UserError, match=message):
            open_or_build(source, BYTES, tmp_path)
        assert left_behind(tmp_path) == []
    source.error = None
    assert open_or_build(source, BYTES, tmp_path).documents == 1


def test_a_corpus_that_is_empty_or_changes_while_it_is_read_leaves_nothing(list_source, tmp_path):
    class Growing(list_source):
        def documents(self):
            self.texts.append("new")
            yield "old"

    for source, message in (
        (list_source(["", ""]), "a list of texts contains no text"),
        (Growing(["old"]), "changed while it was read"),
    ):
        with pytest.raises(UserError, match=message):
            open_or_build(source, BYTES, tmp_path)
        assert left_behind(tmp_path) == []


def test_progress_is_logged(list_source, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(token_cache, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(token_cache, "GROUP_DOCUMENTS", 1)
    with caplog.at_level(logging.INFO):
        open_or_build(list_source(["x" * 100] * 2), BYTES, tmp_path)
    for part in ("tokenizing a list of texts", "0.0 MB of text (50%)", "202 tokens of 2 documents"):
        assert part in caplog.text


SLOW_BUILD = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from flashtrain.data import token_cache
from flashtrain.data.tokenizers import TokenizerSpec

token_cache.GROUP_DOCUMENTS = 1

class SlowSource:
    def describe(self): return "slow"
    def fingerprint(self): return "slow"
    def approximate_bytes(self): return None
    def documents(self):
        with Path(sys.argv[2], "readings").open("a") as file:
            file.write("x")
        for number in range(int(sys.argv[3])):
            yield f"document {number}"
            time.sleep(0.05)

print(token_cache.open_or_build(SlowSource(), TokenizerSpec("bytes"), sys.argv[2]).tokens[:].sum())
"""


def start_slow_build(folder: Path, documents: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", SLOW_BUILD, str(ROOT), str(folder), str(documents)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.integration
def test_two_processes_started_together_build_once(tmp_path):
    processes = [start_slow_build(tmp_path, 20) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert (tmp_path / "readings").read_text() == "x"


@pytest.mark.integration
def test_a_build_killed_midway_leaves_no_cache_and_the_next_one_cleans_up(tmp_path):
    process = start_slow_build(tmp_path, 10_000)
    readings = tmp_path / "readings"
    assert wait_for(
        lambda: (
            list(tmp_path.glob("*.building/tokens.bin"))
            and readings.exists()
            and readings.read_text()
        )
    )
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert list(tmp_path.glob("*.building"))
    assert not [path for path in tmp_path.glob("*/meta.json") if path.parent.suffix != ".building"]

    second = start_slow_build(tmp_path, 3)
    output, errors = second.communicate()
    assert second.returncode == 0, errors
    assert int(output) > 0
    assert not list(tmp_path.glob("*.building"))
    assert readings.read_text() == "xx"


def test_tokenizers_trained_on_less_and_on_more_of_a_text_have_caches_of_their_own(
    list_source, tmp_path
):
    """The one learns from the first text alone, which has no letters that are
    often side by side."""
    texts = ["abcdefgh" * 4, *["zyzyzyzy" * 20] * 5]

    def tokens(size):
        spec = TokenizerSpec("bpe", vocab_size=260, sample_bytes=size)
        return open_or_build(list_source(texts), spec, tmp_path)

    first, second = tokens(8), tokens(sys.maxsize)
    assert first.folder != second.folder
    assert second.tokenizer.encode("zyzy") != first.tokenizer.encode("zyzy")


class Marked:
    """A TextSource that makes its own tokens and marks them, as conversations
    do: one document of 100."""

    def describe(self):
        return "marked tokens"

    def fingerprint(self):
        return "marked"

    def approximate_bytes(self):
        return None

    def documents(self):
        return iter(())

    def encoded(self, tokenizer):
        yield token_cache.Encoded([np.arange(100)], [np.ones(100, np.uint8)], 100)


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "place", "damaged"), [("tokens.bin", 101, 50), ("marks.bin", 99, 99)]
)
def test_a_changed_byte_is_refused_with_the_files_name_where_its_block_is_read(
    tmp_path, monkeypatch, name, place, damaged
):
    monkeypatch.setattr(token_cache, "BLOCK_BYTES", 16)  # 8 tokens, 16 marks
    whole = open_or_build(Marked(), BYTES, tmp_path)
    assert (whole.tokens[:].tolist(), whole.marks[:].tolist()) == (list(range(100)), [1] * 100)
    flip(whole.folder / name, place)
    cache = open_or_build(Marked(), BYTES, tmp_path)
    read = cache.tokens if name == "tokens.bin" else cache.marks
    block = damaged // (8 if name == "tokens.bin" else 16)
    size = 8 if name == "tokens.bin" else 16
    assert len(read[0 : block * size]) == block * size  # whole blocks are read on
    for _ in range(2):
        with pytest.raises(
            UserError, match=f"{whole.folder / name} has changed since it was written"
        ):
            read[damaged : damaged + 1]
    with pytest.raises(UserError, match=name):
        pickle.loads(pickle.dumps(read))[:]  # a worker's, too


def test_changed_places_of_documents_are_refused_when_the_cache_is_opened(list_source, tmp_path):
    folder = open_or_build(list_source(["ab", "c"]), BYTES, tmp_path).folder
    flip(folder / "documents.npy", -8)
    with pytest.raises(
        UserError, match=f"{folder / 'documents.npy'} has changed since it was written"
    ):
        open_or_build(list_source(["ab", "c"]), BYTES, tmp_path)


def test_a_cache_without_checksums_is_read_on_with_a_line(list_source, tmp_path, caplog):
    folder = open_or_build(list_source(["ab", "c"]), BYTES, tmp_path).folder
    meta = json.loads((folder / "meta.json").read_text())
    del meta["crc32"]
    (folder / "meta.json").write_text(json.dumps(meta))
    with caplog.at_level(logging.INFO):
        assert open_or_build(list_source(["ab", "c"]), BYTES, tmp_path).tokens[:].tolist() == [
            97,
            98,
            256,
            99,
            256,
        ]
    assert f"{folder} has no checksums" in caplog.text


@pytest.mark.parametrize("dtype", ["O", "|O", "f2", "int64", "S8", ["O"], None])
def test_the_tokens_of_a_cache_are_of_two_types_whatever_its_meta_json_says(
    list_source, tmp_path, dtype
):
    """numpy takes the numbers of a file of objects for addresses."""
    folder = open_or_build(list_source(["abcdefgh"]), BYTES, tmp_path).folder
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "tokens": 1, "dtype": dtype}))
    with pytest.raises(UserError, match=rf"dtype in {folder}/meta\.json.*uint16, uint32"):
        open_or_build(list_source(["abcdefgh"]), BYTES, tmp_path)


def test_tokens_stay_on_disk_until_they_are_read(list_source, tmp_path):
    found = open_or_build(list_source(["text"]), BYTES, tmp_path).tokens[0:2]
    while isinstance(found, np.ndarray) and found.base is not None:
        found = found.base
    assert isinstance(found, mmap.mmap)
