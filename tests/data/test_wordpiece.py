"""BERT's WordPiece tokenizer, read from a Hugging Face folder and from one that we saved."""

from __future__ import annotations

import pytest

from flashtrain.data.tokenizers import load_tokenizer
from flashtrain.data.wordpiece import WordPieceTokenizer
from flashtrain.errors import UserError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "Play"]


@pytest.mark.parametrize(("settings", "ids"), [(None, [5, 6]), ('{"do_lower_case": false}', [7, 6])])
def test_words_are_cut_into_the_vocabulary_and_case_is_as_the_folder_says(tmp_path, settings, ids) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    if settings:
        (tmp_path / "tokenizer_config.json").write_text(settings)
    tokenizer = WordPieceTokenizer.beside(tmp_path)
    assert tokenizer.encode("Playing") == ids
    assert tokenizer.encode_batch(["Playing", ""])[0].tolist() == ids
    assert (tokenizer.vocab_size, tokenizer.special.classify, tokenizer.special.mask) == (8, 2, 4)
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.encode("Playing") == ids
    assert again.fingerprint() == tokenizer.fingerprint()


def test_a_folder_without_one_has_none_and_another_kind_is_refused(tmp_path) -> None:
    assert WordPieceTokenizer.beside(tmp_path) is None
    (tmp_path / "vocab.txt").write_text("\n".join(["[UNK]", "[PAD]", "a"]))
    with pytest.raises(UserError, match=r"vocab\.txt cannot be read: sep_token not found"):
        WordPieceTokenizer.beside(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(["[UNK]", "[CLS]", "[SEP]", "a"]))
    with pytest.raises(UserError, match=r"has no \[PAD\], \[MASK\]"):
        WordPieceTokenizer.beside(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        WordPieceTokenizer.beside(tmp_path)
