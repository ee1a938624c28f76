"""BERT's WordPiece tokenizer as Hugging Face folders have it, for weights that were trained with it.

Source: Devlin et al. 2019 (arXiv 1810.04805), run by the Hugging Face `tokenizers` library.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import BertWordPieceTokenizer
from tokenizers import Tokenizer as RustTokenizer

from flashtrain.data.special_tokens import SpecialTokens
from flashtrain.errors import UserError
from flashtrain.files.disk import write_atomically
from flashtrain.files.foreign_files import read_json_object, read_text

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
FILE, VOCABULARY, SETTINGS = "tokenizer.json", "vocab.txt", "tokenizer_config.json"


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
        if self.vocab_size > 2 * len(numbers):  # every id below the largest gets a row of the model's
            raise UserError(f"the tokenizer has {len(numbers):,} tokens, and ids up to {max(numbers):,}.")
        pad, classify, separate, mask = ids
        self.special = SpecialTokens(pad, classify, separate, mask, max(ids) + 1, self.vocab_size, self.vocab_size)
        self.end_of_text: int = separate

    @classmethod
    def beside(cls, folder: str | os.PathLike[str]) -> WordPieceTokenizer | None:
        """The tokenizer of a Hugging Face folder (tokenizer.json, or vocab.txt and what its settings say of case).

        None where there is none. UserError: a file that cannot be read.
        """
        folder = Path(folder)
        try:
            if (folder / FILE).is_file():
                return cls(RustTokenizer.from_str(read_text(folder / FILE)))
            if not (folder / VOCABULARY).is_file():
                return None
            words = read_text(folder / VOCABULARY).splitlines()
            missing = [token for token in SPECIAL if token not in words]
            if missing:
                raise UserError(f"{folder / VOCABULARY} has no {', '.join(missing)}. Possible: that of a BERT.")
            told = read_json_object(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
            lower = bool(told.get("do_lower_case", True))
            made = BertWordPieceTokenizer(str(folder / VOCABULARY), lowercase=lower)
            return cls(RustTokenizer.from_str(made.to_str()))
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"the tokenizer in {folder} cannot be read: {' '.join(str(error).split())}.") from error

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
        write_atomically(folder / SETTINGS, json.dumps({"flashtrain": {"kind": self.kind}}, indent=1))
