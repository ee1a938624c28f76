"""BERT's WordPiece tokenizer, read from a Hugging Face folder and from one that we saved."""

from __future__ import annotations

import pytest

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
