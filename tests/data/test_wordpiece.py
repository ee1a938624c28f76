"""BERT's WordPiece tokenizer, read from a Hugging Face folder and from one that we saved."""

from __future__ import annotations

import pytest

from flashtrain.data.special_tokens import counted
from flashtrain.data.wordpiece import WordPieceTokenizer
from flashtrain.errors import UserError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "Play"]


def test_a_folder_without_one_has_none_and_another_kind_is_refused(tmp_path) -> None:
    assert WordPieceTokenizer.load(tmp_path) is None
    (tmp_path / "vocab.txt").write_text("\n".join(["[UNK]", "[PAD]", "a"]))
    with pytest.raises(UserError, match=r"vocab\.txt cannot be read: sep_token not found"):
        WordPieceTokenizer.load(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(["[UNK]", "[CLS]", "[SEP]", "a"]))
    with pytest.raises(UserError, match=r"has no \[PAD\], \[MASK\]"):
        WordPieceTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        WordPieceTokenizer.load(tmp_path)


def test_what_a_text_spells_is_reported_to_be_read_as_tokens(tmp_path, caplog) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join([*WORDS, "a"]))
    tokenizer = WordPieceTokenizer.load(tmp_path)
    assert list(counted(["a [SEP]", "a"], tokenizer)) == ["a [SEP]", "a"]
    assert tokenizer is not None
    assert len(tokenizer.encode("a [SEP]")) == 2
    assert (
        "1 texts spell special tokens, read as tokens (data.special_tokens): [SEP] in 1"
        in caplog.text
    )
