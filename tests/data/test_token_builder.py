"""Writing a token cache: streamed, and with nothing left behind when it fails."""

from __future__ import annotations

import errno
import logging

import pytest

from flashtrain.data import token_builder
from flashtrain.data.token_builder import open_or_build
from flashtrain.data.tokenizers import TokenizerSpec
from flashtrain.errors import UserError

BYTES = TokenizerSpec("bytes")


def left_behind(folder) -> list[str]:
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


def test_documents_are_read_in_groups_of_bounded_size(list_source, tmp_path, monkeypatch):
    monkeypatch.setattr(token_builder, "GROUP_CHARACTERS", 10)
    groups = list(token_builder._groups(["aaaa", "bbbb", "cccc", "", "d" * 30, "e"]))
    assert groups == [["aaaa", "bbbb", "cccc"], ["d" * 30], ["e"]]
    monkeypatch.setattr(token_builder, "GROUP_DOCUMENTS", 2)
    assert list(token_builder._groups("abc")) == [["a", "b"], ["c"]]


def test_the_groups_do_not_change_the_tokens(list_source, tmp_path, monkeypatch):
    texts = [f"text {number}" for number in range(50)]
    spec = TokenizerSpec("bpe", vocab_size=270)
    at_once = open_or_build(list_source(texts), spec, tmp_path / "a")
    monkeypatch.setattr(token_builder, "GROUP_CHARACTERS", 20)
    in_groups = open_or_build(list_source(texts), spec, tmp_path / "b")
    assert at_once.tokens.tolist() == in_groups.tokens.tolist()
    assert at_once.offsets.tolist() == in_groups.offsets.tolist()


def test_a_full_disk_is_told_with_what_is_needed_and_leaves_nothing(list_source, tmp_path, monkeypatch):
    monkeypatch.setattr(token_builder, "GROUP_DOCUMENTS", 1)
    write, writes = token_builder._write, []

    def full_after_two(file, tokens):
        writes.append(len(tokens))
        if len(writes) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, tokens)

    monkeypatch.setattr(token_builder, "_write", full_after_two)
    with pytest.raises(UserError, match=r"the disk is full: .* free .* about 8 KB are needed .*cache_dir") as told:
        open_or_build(list_source(["x" * 1000] * 4), BYTES, tmp_path)
    assert str(tmp_path) in str(told.value)
    assert "\n" not in str(told.value)
    assert left_behind(tmp_path) == []


def test_an_error_of_the_source_midway_leaves_nothing_and_the_next_build_works(list_source, tmp_path):
    class Broken(list_source):
        broken = True

        def documents(self):
            yield "fine"
            if self.broken:
                raise UserError("line 2 is no text")

    source = Broken(["fine"])
    with pytest.raises(UserError, match="line 2 is no text"):
        open_or_build(source, BYTES, tmp_path)
    assert left_behind(tmp_path) == []
    source.broken = False
    assert open_or_build(source, BYTES, tmp_path).meta.documents == 1


def test_a_source_that_changes_while_it_is_read_is_not_kept(list_source, tmp_path):
    class Growing(list_source):
        def documents(self):
            self.texts.append("new")
            yield "old"

    with pytest.raises(UserError, match="changed while it was read"):
        open_or_build(Growing(["old"]), BYTES, tmp_path)
    assert left_behind(tmp_path) == []


def test_without_a_terminal_progress_is_logged_lines(list_source, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(token_builder, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(token_builder, "GROUP_DOCUMENTS", 1)
    with caplog.at_level(logging.INFO):
        open_or_build(list_source(["x" * 100] * 2), BYTES, tmp_path)
    assert "tokenizing a list of texts: 100 bytes, 0.0M tokens (50%)" in caplog.text
    assert "202 tokens of 2 documents written" in caplog.text


def test_on_a_terminal_progress_is_a_bar(list_source, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    open_or_build(list_source(["x" * 100] * 2), BYTES, tmp_path)
    assert "tokenizing a list of texts" in capsys.readouterr().err
