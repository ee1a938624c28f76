"""The tokenizer for token files that come without a tokenizer: a text is ids
separated by spaces."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from flashtrain.data.library_tokenizer import CONFIG, MARK
from flashtrain.errors import UserError
from flashtrain.files.disk import write_atomically


class TokenIds:
    """A Tokenizer whose texts are ids separated by spaces.

    Args:
        vocab_size: Number of tokens.
        end_of_text: The id that ends documents; None if there is none, and
            the attribute is then -1.
    """

    kind = "ids"

    def __init__(self, vocab_size: int, end_of_text: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.end_of_text = -1 if end_of_text is None else end_of_text

    def encode(self, text: str) -> list[int]:
        words = text.split()
        if not all(
            word.isascii() and word.isdecimal() and int(word[:20]) < self.vocab_size
            for word in words
        ):
            raise UserError(
                f"these tokens have no tokenizer: expected ids below {self.vocab_size:,} separated "
                "by spaces, such as "
                'prompt="12 7 9".'
            )
        return [int(word) for word in words]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(self.encode(text), dtype=np.uint32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(token)) for token in ids)

    def describe(self) -> str:
        return f"no tokenizer ({self.vocab_size:,} tokens)"

    def fingerprint(self) -> str:
        return f"ids {self.vocab_size} {self.end_of_text}"

    def save(self, folder: str | os.PathLike[str]) -> None:
        saved = {"kind": self.kind, "vocab_size": self.vocab_size, "end_of_text": self.end_of_text}
        write_atomically(Path(folder) / CONFIG, json.dumps({MARK: saved}, indent=1))
