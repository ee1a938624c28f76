"""BERT's special tokens and its WordPiece tokenizer.

Source: Devlin et al. 2019 (arXiv 1810.04805).
"""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tokenizers import BertWordPieceTokenizer, Tokenizer

from flashtrain.data.library_tokenizer import (
    CONFIG,
    FILE,
    LibraryTokenizer,
    read_if_there,
    read_tokenizer,
)
from flashtrain.errors import UserError

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY = "vocab.txt"


class SpecialTokens(NamedTuple):
    """The ids of [PAD], [CLS], [SEP] and [MASK], and the range of ids that stand for text."""

    pad: int  # fills the rest of a row, and is not attended to
    classify: int  # first token of every sample
    separate: int  # after each segment
    mask: int
    ordinary_begin: int  # the ids of text are range(ordinary_begin, ordinary_end)
    ordinary_end: int
    vocab_size: int  # one more than the largest id

    @classmethod
    def past(cls, vocab_size: int) -> SpecialTokens:
        """Return the special tokens for a tokenizer that has none of them: they get the four ids
        from `vocab_size`, its number of tokens, on.

        Such are the tokenizers bytes, bpe and gpt2. Their only special token, end of text, ends a
        document in the token file and is not part of any sample.
        """
        pad, classify, separate, mask = range(vocab_size, vocab_size + 4)
        return cls(pad, classify, separate, mask, 0, vocab_size, vocab_size + 4)


class WordPieceTokenizer(LibraryTokenizer):
    """The tokenizer of a BERT, whose vocabulary has [PAD], [CLS], [SEP] and [MASK]. It adds
    none of them to a text.

    It reads the spelling "[SEP]" in a text as that token, as transformers does and our other
    tokenizers do not. Its end_of_text is [SEP], as BERT has no other end of a document. Raises
    UserError if one of the four is missing.
    """

    kind, name = "wordpiece", "WordPiece"

    def __init__(self, library: Tokenizer) -> None:
        known = {token: library.token_to_id(token) for token in SPECIAL}
        missing = [token for token, number in known.items() if number is None]
        if missing:
            raise UserError(
                f"the tokenizer has no {', '.join(missing)}: expected the tokenizer of a BERT."
            )
        pad, classify, separate, mask = ids = [
            number for number in known.values() if number is not None
        ]
        super().__init__(library, separate)
        library.encode_special_tokens = False
        self.special = SpecialTokens(
            pad, classify, separate, mask, max(ids) + 1, self.vocab_size, self.vocab_size
        )

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> WordPieceTokenizer | None:
        """Load the tokenizer of a Hugging Face folder: tokenizer.json, or vocab.txt with the
        folder's do_lower_case.

        Returns:
            The tokenizer, or None if the folder has none.

        Raises:
            UserError: A file cannot be read, or the tokenizer is of another kind.
        """
        folder = Path(folder)
        if (folder / FILE).is_file():
            return cls(read_tokenizer(folder / FILE))
        if not (folder / VOCABULARY).is_file():
            return None
        config = read_if_there(folder / CONFIG)
        read = partial(BertWordPieceTokenizer, lowercase=bool(config.get("do_lower_case", True)))
        return cls(Tokenizer.from_str(read_tokenizer(folder / VOCABULARY, read).to_str()))

    def fingerprint(self) -> str:
        return hashlib.sha256(self._library.to_str().encode()).hexdigest()
