"""The tokens that BERT adds to a text, and its WordPiece tokenizer as Hugging Face folders have it.

Source: Devlin et al. 2019 (arXiv 1810.04805).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import BertWordPieceTokenizer
from tokenizers import Tokenizer as RustTokenizer

from flashtrain.data.tokenizer_files import CONFIG, FILE, MARK, read_tokenizer
from flashtrain.errors import UserError
from flashtrain.files.disk import write_atomically
from flashtrain.files.json_files import read_json


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
        pad, classify, separate, mask = range(vocab_size, vocab_size + 4)
        return cls(pad, classify, separate, mask, 0, vocab_size, vocab_size + 4)


SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY = "vocab.txt"


class WordPieceTokenizer:
    """A tokenizer that has [PAD], [CLS], [SEP] and [MASK] of its own; it adds none of them to a text.

    vocab_size, special: the tokens it has. end_of_text: [SEP], since it has nothing else that closes a document.
    UserError: one of the four is missing.
    """

    kind = "wordpiece"

    def __init__(self, tokenizer: RustTokenizer) -> None:
        known = {token: tokenizer.token_to_id(token) for token in SPECIAL}
        ids = [number for number in known.values() if number is not None]
        if len(ids) < len(SPECIAL):
            missing = [token for token, number in known.items() if number is None]
            raise UserError(f"the tokenizer has no {', '.join(missing)}. Possible: one of a BERT.")
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        numbers = tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size: int = max(numbers) + 1
        pad, classify, separate, mask = ids
        self.special = SpecialTokens(pad, classify, separate, mask, max(ids) + 1, self.vocab_size, self.vocab_size)
        self.end_of_text: int = separate

    @classmethod
    def beside(cls, folder: str | os.PathLike[str]) -> WordPieceTokenizer | None:
        """The tokenizer of a Hugging Face folder (tokenizer.json, or vocab.txt and what its settings say of case).

        None where there is none. UserError: a file that cannot be read, or a tokenizer of another kind.
        """
        folder = Path(folder)
        if (folder / FILE).is_file():
            return cls(read_tokenizer(folder / FILE))
        if not (folder / VOCABULARY).is_file():
            return None
        config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
        read = partial(BertWordPieceTokenizer, lowercase=bool(config.get("do_lower_case", True)))
        return cls(RustTokenizer.from_str(read_tokenizer(folder / VOCABULARY, read).to_str()))

    def library_form(self) -> RustTokenizer:
        """A copy of the Hugging Face library's tokenizer."""
        return RustTokenizer.from_str(self._tokenizer.to_str())

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int64) for one in found]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def describe(self) -> str:
        return f"WordPiece ({self.vocab_size:,} tokens)"

    def fingerprint(self) -> str:
        return hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()

    def save(self, folder: str | os.PathLike[str]) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / FILE, self._tokenizer.to_str())
        write_atomically(folder / CONFIG, json.dumps({MARK: {"kind": self.kind}}, indent=1))
