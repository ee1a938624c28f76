"""The tokenizer of a Hugging Face folder (tokenizer.json), as it is, run by the Hugging Face `tokenizers` library."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as RustTokenizer

from flashtrain.data.bpe import rust_threads, split_long
from flashtrain.errors import UserError
from flashtrain.files.disk import write_atomically
from flashtrain.files.foreign_files import read_json_object, read_text

FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"


class HuggingFaceTokenizer:
    """end_of_text: the token that closes a document, which the folder calls eos_token."""

    kind = "huggingface"

    def __init__(self, tokenizer: RustTokenizer, end_of_text: int, settings: dict[str, object]) -> None:
        tokenizer.encode_special_tokens = True  # a text that spells a special token does not end its document
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer, self._settings = tokenizer, settings
        self.end_of_text = end_of_text
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> HuggingFaceTokenizer:
        """Read tokenizer.json and tokenizer_config.json. UserError: missing or damaged, or without an eos_token."""
        folder = Path(folder).expanduser()
        if not (folder / FILE).is_file():
            raise UserError(f"no {FILE} in {folder}: choose data.tokenizer=bytes, bpe or gpt2, or add its tokenizer.")
        settings = read_json_object(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
        try:
            tokenizer = RustTokenizer.from_str(read_text(folder / FILE))
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{folder / FILE} is no tokenizer: {' '.join(str(error).split())[:200]}.") from error
        end = settings.get("eos_token")
        end = end.get("content") if isinstance(end, dict) else end
        number = tokenizer.token_to_id(end) if isinstance(end, str) else None
        if number is None:
            raise UserError(f"{folder / SETTINGS} names no eos_token, which closes every document.")
        return cls(tokenizer, number, settings)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = []
        with rust_threads():
            for text in texts:
                parts = self._tokenizer.encode_batch_fast(list(split_long(text)), add_special_tokens=False)
                ids = [np.asarray(part.ids, dtype=np.uint32) for part in parts]
                found.append(np.concatenate(ids) if ids else np.empty(0, np.uint32))
        return found

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    def describe(self) -> str:
        return f"the model's own tokenizer ({self.vocab_size:,} tokens)"

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.end_of_text} {self._tokenizer.to_str()}".encode()).hexdigest()

    def save(self, folder: str | os.PathLike[str]) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / FILE, self._tokenizer.to_str())
        settings = {**self._settings, "flashtrain": {"kind": self.kind}}
        write_atomically(folder / SETTINGS, json.dumps(settings, indent=1))
