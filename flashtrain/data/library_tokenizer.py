"""Base class of the tokenizers that the Hugging Face `tokenizers` library runs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from flashtrain.errors import UserError, first_line
from flashtrain.files.disk import write_atomically
from flashtrain.files.json_files import read_json

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
MARK = "flashtrain"  # key in CONFIG of {"kind": ...}, the kind of tokenizer that flashtrain saved
# The class of transformers that reads FILE unchanged: others rebuild parts of it.
TAKEN_AS_IT_IS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
}
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token of SentencePiece for one byte of a character
PARALLELISM = "TOKENIZERS_PARALLELISM"


# Why not transformers' AutoTokenizer (5.23): it reads the spelling of a special token in a text as
# that token unless it is called with split_special_tokens=True, rebuilds parts of tokenizer.json
# for some classes, and is not always there.
class LibraryTokenizer:
    """A Tokenizer that adds nothing to a text, never truncates or pads, and reads a special
    token's spelling as text.

    A subclass sets `kind` and `name`, and defines `fingerprint`.
    """

    kind: str
    name: str
    begin_of_text: Sequence[int] = ()  # ids that stand before a text
    config: dict[str, Any] = TAKEN_AS_IT_IS  # what transformers reads in tokenizer_config.json

    def __init__(self, library: Tokenizer, end_of_text: int) -> None:
        library.no_padding()
        library.no_truncation()
        library.encode_special_tokens = True
        self._library = library
        self.end_of_text = end_of_text  # id that ends every document
        self.vocab_size: int = max(library.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def letters(self) -> bool:
        """Whether `encode` reads a special token's spelling in a text as ordinary letters,
        and not as that token."""
        return self._library.encode_special_tokens

    @property
    def spellings(self) -> list[str]:
        """The texts of the special tokens, such as "<|endoftext|>"."""
        return [
            one.content for one in self._library.get_added_tokens_decoder().values() if one.special
        ]

    def with_special_tokens(self) -> LibraryTokenizer:
        """Return a copy that reads the spelling of a special token as that token; files that the
        copy saves do not record this."""
        other = copy(self)
        other._library = self.library_form()
        return other

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, dtype=np.uint32) for one in found]

    def decode(self, ids: Iterable[int], *, special: bool = True) -> str:
        """Decode ids to a text. If `special` is false, special tokens are left out of the text."""
        return self._library.decode([int(token) for token in ids], skip_special_tokens=not special)

    def text_bytes(self, counts: Mapping[int, int]) -> int:
        """Return the UTF-8 bytes of a text with so many of each id; special tokens have none."""
        ids, library = list(counts), self._library
        added = library.get_added_tokens_decoder()
        byte_level = "ByteLevel" in repr(library.decoder)  # in whose alphabet a letter is a byte
        # After another token, since the first one of a text may lose its space.
        pairs = library.decode_batch([(ids[0], one) for one in ids], skip_special_tokens=False)
        before = len(library.decode(ids[:1], skip_special_tokens=False).encode())

        def size(one: int, pair: str) -> int:
            if one in added:
                return 0 if added[one].special else len(added[one].content.encode())
            piece = library.id_to_token(one) or ""
            if byte_level or BYTE.fullmatch(piece):
                return len(piece) if byte_level else 1
            return len(pair.encode()) - before

        return sum(counts[one] * size(one, pair) for one, pair in zip(ids, pairs, strict=True))

    def describe(self) -> str:
        return f"{self.name} ({self.vocab_size:,} tokens)"

    def library_form(self) -> Tokenizer:
        """Return a copy as a `tokenizers.Tokenizer` that reads the spelling of a
        special token as that token."""
        return Tokenizer.from_str(self._library.to_str())

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the tokenizer's files, which
        transformers.AutoTokenizer.from_pretrained(folder) reads too."""
        write_atomically(Path(folder, FILE), self._library.to_str())
        write_atomically(
            Path(folder, CONFIG), json.dumps({**self.config, MARK: {"kind": self.kind}}, indent=1)
        )


def read_tokenizer(path: Path | str, read: Callable[[str], Any] = Tokenizer.from_file) -> Any:
    """Call `read` with a tokenizer file's path, or with a tokenizer's name, and return its result.
    Raises UserError, which names it."""
    try:
        return read(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise UserError(f"the tokenizer {path} cannot be read: {first_line(error)}.") from error


def read_if_there(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty dict if the file does not exist."""
    return read_json(path) if path.is_file() else {}


# The library's threads do not survive a fork: once they have run, a forked process (such as a
# DataLoader's worker) prints a warning unless the variable is set (tokenizers 0.22).
def _before_fork() -> None:
    # Capitalized, to know it as ours: the library reads "false".
    os.environ.setdefault(PARALLELISM, "False")


def _after_fork() -> None:
    if os.environ.get(PARALLELISM) == "False":
        del os.environ[PARALLELISM]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)
