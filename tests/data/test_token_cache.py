"""The token file on disk: found again, told apart, checked, and never half there."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import wait_for

from flashtrain.data.token_builder import open_or_build
from flashtrain.data.token_cache import DamagedCacheError, open_cache
from flashtrain.data.tokenizers import ByteTokenizer, TokenizerSpec
from flashtrain.errors import UserError

ROOT = Path(__file__).parents[2]
BYTES = TokenizerSpec("bytes")


def test_every_document_lies_between_its_offsets_closed_by_end_of_text(list_source, tmp_path):
    cache = open_or_build(list_source(["ab", "", "c", "ü"]), BYTES, tmp_path)
    assert cache.tokens.tolist() == [97, 98, 256, 99, 256, 0xC3, 0xBC, 256]
    assert cache.offsets.tolist() == [0, 3, 5, 8]
    assert (cache.tokens.dtype, cache.offsets.dtype) == (np.uint16, np.int64)
    assert isinstance(cache.tokenizer, ByteTokenizer)


def test_meta_tells_source_tokenizer_and_counts(list_source, tmp_path):
    source = list_source(["ab", "ü"])
    cache = open_or_build(source, BYTES, tmp_path)
    meta = json.loads((cache.folder / "meta.json").read_text())
    assert meta["source"] == "a list of texts"
    assert meta["source_fingerprint"] == source.fingerprint()
    assert meta["tokenizer_fingerprint"] == ByteTokenizer().fingerprint()
    assert (meta["tokens"], meta["documents"], meta["text_bytes"], meta["dtype"]) == (6, 2, 4, "uint16")
    assert meta["files"]["tokens.bin"]["bytes"] == 12
    assert set(meta["files"]) == {"tokens.bin", "documents.npy", "tokenizer/tokenizer_config.json"}


def test_a_large_vocabulary_takes_four_bytes_a_token(list_source, tmp_path):
    class Wide(ByteTokenizer):
        vocab_size = 70_000
        end_of_text = 69_999

    cache = open_or_build(list_source(["a"]), Wide(), tmp_path)
    assert cache.tokens.dtype == np.uint32
    assert cache.tokens.tolist() == [97, 69_999]


def test_an_unchanged_source_is_read_once(list_source, tmp_path):
    source = list_source(["text"])
    first = open_or_build(source, BYTES, tmp_path)
    second = open_or_build(list_source(["text"]), BYTES, tmp_path)
    assert first.folder == second.folder
    assert source.readings == 1


def test_a_changed_source_or_tokenizer_is_another_cache(list_source, tmp_path):
    folders = {
        open_or_build(list_source(["text"]), BYTES, tmp_path).folder,
        open_or_build(list_source(["text!"]), BYTES, tmp_path).folder,
        open_or_build(list_source(["text"]), TokenizerSpec("bpe", vocab_size=258), tmp_path).folder,
        open_or_build(list_source(["text"]), TokenizerSpec("bpe", vocab_size=259), tmp_path).folder,
    }
    assert len(folders) == 4


def test_caches_live_in_the_default_folder_unless_told_otherwise(list_source, cache_home):
    assert open_or_build(list_source(["text"]), BYTES).folder.parent == cache_home


def shorten_tokens(folder):
    with (folder / "tokens.bin").open("rb+") as file:
        file.truncate(4)


def cut_meta(folder):
    (folder / "meta.json").write_text((folder / "meta.json").read_text()[:50])


def remove_meta(folder):
    (folder / "meta.json").unlink()


@pytest.mark.parametrize("damage", [shorten_tokens, cut_meta, remove_meta])
def test_a_damaged_cache_is_found_told_in_one_line_and_rebuilt(list_source, tmp_path, damage, caplog):
    source = list_source(["some text", "more"])
    cache = open_or_build(source, BYTES, tmp_path)
    before = cache.tokens.tolist()
    damage(cache.folder)
    with pytest.raises(DamagedCacheError):
        open_cache(cache.folder)
    rebuilt = open_or_build(source, BYTES, tmp_path)
    assert rebuilt.tokens.tolist() == before
    assert source.readings == 2
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "is damaged" in warnings[0].getMessage()
    assert sorted(path.name for path in tmp_path.iterdir()) == [cache.folder.name, f"{cache.folder.name}.lock"]


def test_an_empty_corpus_is_told_and_leaves_nothing(list_source, tmp_path):
    with pytest.raises(UserError, match="a list of texts holds no text: the corpus is empty"):
        open_or_build(list_source(["", ""]), BYTES, tmp_path)
    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_a_cache_folder_that_cannot_be_written_is_named(list_source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to the cache folder .*file/below.*FLASHTRAIN_CACHE"):
        open_or_build(list_source(["a"]), BYTES, tmp_path / "file" / "below")


SLOW_BUILD = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from flashtrain.data import token_builder
from flashtrain.data.token_builder import open_or_build
from flashtrain.data.tokenizers import TokenizerSpec

token_builder.GROUP_DOCUMENTS = 1

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

print(open_or_build(SlowSource(), TokenizerSpec("bytes"), sys.argv[2]).tokens.sum())
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
    assert wait_for(lambda: list(tmp_path.glob("*.building-*/tokens.bin")))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert list(tmp_path.glob("*.building-*"))
    assert not list(tmp_path.glob("*/meta.json"))

    second = start_slow_build(tmp_path, 3)
    output, errors = second.communicate()
    assert second.returncode == 0, errors
    assert int(output) > 0
    assert not list(tmp_path.glob("*.building-*"))
    assert (tmp_path / "readings").read_text() == "xx"
