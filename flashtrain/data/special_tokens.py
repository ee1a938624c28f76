"""The tokens that BERT adds to a text: [PAD], [CLS], [SEP], [MASK]."""

from __future__ import annotations

from typing import NamedTuple

from flashtrain.errors import UserError


class SpecialTokens(NamedTuple):
    """Their ids, and which ids stand for text.

    pad: fills what is left of a row; nothing sees it. classify: [CLS], first of every sample. separate: [SEP], after
    each segment. mask: [MASK]. ordinary_begin, ordinary_end: ids from the one up to, not including, the other stand for
    text; a random token is drawn from them. vocab_size: one more than the largest id.
    """

    pad: int
    classify: int
    separate: int
    mask: int
    ordinary_begin: int
    ordinary_end: int
    vocab_size: int

    @classmethod
    def past(cls, vocab_size: int) -> SpecialTokens:
        """Four new ids past those of a tokenizer of `vocab_size` tokens.

        Our tokenizers (bytes, bpe, gpt2) have none of the four; theirs is the end of text only, which closes a document
        in the token file and is no part of any sample.
        """
        if vocab_size < 1:
            raise UserError(f"a vocabulary of {vocab_size} tokens. Possible: 1 or more.")
        pad, classify, separate, mask = range(vocab_size, vocab_size + 4)
        return cls(pad, classify, separate, mask, 0, vocab_size, vocab_size + 4)

    @classmethod
    def of_bert_uncased(cls) -> SpecialTokens:
        """Those of the published bert-base-uncased and bert-large-uncased: 30,522 tokens, of which 999 on are text."""
        return cls(0, 101, 102, 103, 999, 30522, 30522)
