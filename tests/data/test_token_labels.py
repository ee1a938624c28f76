"""A label for each word: at its first token, in packed and padded batches."""

from __future__ import annotations

import pytest

from flashtrain.data.labelled_examples import TokenLabelledSamples, WordRow, encode_words
from flashtrain.data.tokenizers import ByteTokenizer
from flashtrain.data.wordpiece import SpecialTokens
from flashtrain.errors import UserError

SPECIAL = SpecialTokens.past(257)
ROWS = [WordRow(["ab", "c"], ["X", "O"]), WordRow(["d"], ["X"])]


def test_the_first_token_of_a_word_has_its_label() -> None:
    texts = encode_words(ROWS, ByteTokenizer())
    assert texts.label_names == ("O", "X")
    assert bytes(texts.tokens.tolist()) == b"ab cd"
    assert texts.labels.tolist() == [1, -100, 0, -100, 1]
    assert texts.lengths.tolist() == [4, 1]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_batches_lay_labels_out_as_their_tokens(layout) -> None:
    batch = TokenLabelledSamples(encode_words(ROWS, ByteTokenizer()), SPECIAL, 5, layout=layout)[[0, 1]]
    first, second = [-100, 1, -100, 0, -100], [-100, 1, -100]
    if layout == "packed":
        assert batch["cu_seqlens"].tolist() == [0, 5, 8]
        assert batch["labels"].tolist() == [*first, *second, -100, -100]
    else:
        assert batch["lengths"].tolist() == [5, 3]
        assert batch["labels"].tolist() == [first, [*second, -100, -100]]
    assert batch["tokens"].shape == batch["labels"].shape


def test_a_label_that_was_not_trained_on_is_refused() -> None:
    with pytest.raises(UserError, match=r"has the label 'X'\. Possible: O"):
        encode_words(ROWS, ByteTokenizer(), ["O"])
