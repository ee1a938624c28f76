"""`flashtrain cache`: what the cache holds, and what of it is removed."""

from __future__ import annotations

import os

import filelock
import pytest

from flashtrain.command.cache import clear, entries, run_cache
from flashtrain.data.token_builder import open_or_build
from flashtrain.data.tokenizers import TokenizerSpec
from flashtrain.errors import UserError

BYTES = TokenizerSpec("bytes")


@pytest.fixture
def built(list_source, cache_home):
    """Two token files, and something of somebody else's beside them."""
    folders = [open_or_build(list_source([text]), BYTES).folder for text in ("one", "three")]
    (cache_home / "hub-commits").mkdir()
    (cache_home / "mine.txt").write_text("keep")
    return folders


def test_it_tells_text_tokenizer_tokens_size_and_last_use(built, cache_home, capsys):
    os.utime(built[0] / "meta.json", (86400 * 365, 86400 * 365))
    assert run_cache([]) == 0
    head, latest, oldest, total, how = capsys.readouterr().out.splitlines()
    assert head.split() == ["key", "text", "tokenizer", "tokens", "size", "last", "used"]
    assert latest.startswith(f"{built[1].name}  a list of texts  bytes (257 tokens)  6 ")
    assert oldest.startswith(built[0].name)
    assert "1971-01-01" in oldest
    assert total.startswith("2 token files, ")
    assert total.endswith(str(cache_home))
    assert "cache clear KEY" in how


def test_opening_a_token_file_is_its_last_use(built, list_source, cache_home):
    os.utime(built[0] / "meta.json", (86400, 86400))
    assert entries(cache_home)[-1].folder == built[0]
    open_or_build(list_source(["one"]), BYTES)
    assert entries(cache_home)[0].folder == built[0]


def test_one_is_removed_by_its_key_and_its_lock_with_it(built, cache_home):
    (said,) = clear(cache_home, built[0].name)
    assert said.startswith(f"removed {built[0].name}, ")
    assert not built[0].exists()
    assert not list(cache_home.glob(f"{built[0].name}*"))
    assert built[1].exists()


def test_all_are_removed_with_what_killed_builds_left_and_nothing_else(built, cache_home):
    left = cache_home / f"{built[0].name}.building-77-0123abcd"
    left.mkdir()
    (left / "tokens.bin").write_bytes(b"half")
    assert len(list(clear(cache_home, "all"))) == 3
    assert sorted(path.name for path in cache_home.iterdir() if path.suffix != ".lock") == ["hub-commits", "mine.txt"]


def test_what_is_being_written_stays(built, cache_home):
    with filelock.FileLock(f"{built[0]}.lock"):
        said = list(clear(cache_home, "all"))
    assert f"{built[0].name} is being written: it stays" in said
    assert built[0].exists()
    assert not built[1].exists()


def test_a_file_of_somebody_elses_stays_also_behind_a_link(built, cache_home, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "tokenizer_config.json").write_text("mine")
    tokenizer = built[0] / "tokenizer"
    (tokenizer / "tokenizer_config.json").unlink()
    tokenizer.rmdir()
    tokenizer.symlink_to(outside)
    (built[1] / "notes.txt").write_text("mine")
    said = list(clear(cache_home, "all"))
    assert (outside / "tokenizer_config.json").read_text() == "mine"
    assert [path.name for path in built[1].iterdir()] == ["notes.txt"]
    assert any("the folder stays, with what is not flashtrain's: notes.txt" in line for line in said)


def test_mistakes_are_one_line(built, cache_home, tmp_path, capsys):
    with pytest.raises(UserError, match=rf"no token file 'nosuch' in .* Possible: all, .*{built[0].name}"):
        run_cache(["clear", "nosuch"])
    with pytest.raises(UserError, match=r"'cache clean' is no command\. Possible: flashtrain cache, "):
        run_cache(["clean"])
    assert run_cache([f"data.cache_dir={tmp_path / 'empty'}"]) == 0
    assert "no token file in" in capsys.readouterr().out
