"""What all tokenizers of the Hugging Face library have in common here, and the files that they are saved as."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from flashtrain.errors import UserError, first_line
from flashtrain.files.disk import write_atomically

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
MARK = "flashtrain"  # in CONFIG: {"kind": ...}, what the tokenizer is to flashtrain
# The class that takes FILE as it is: others of transformers build parts of it anew.
TAKEN_AS_IT_IS = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
PARALLELISM = "TOKENIZERS_PARALLELISM"


# transformers' AutoTokenizer (5.23) takes what spells a special token in a text for that token unless it is called with
# split_special_tokens=True, builds parts of tokenizer.json anew for some classes, and is not everywhere.
class LibraryTokenizer:
    """A tokenizer that adds nothing to a text, cuts and pads none, and takes a special token that a text spells for
    text. A subclass says its kind, and its fingerprint.

    end_of_text: the id that closes every document. begin_of_text: the ids that stand before a text. config: what
    transformers reads in tokenizer_config.json.
    """

    kind: str
    name: str
    begin_of_text: Sequence[int] = ()
    config: dict[str, Any] = TAKEN_AS_IT_IS

    def __init__(self, library: Tokenizer, end_of_text: int) -> None:
        library.no_padding()
        library.no_truncation()
        library.encode_special_tokens = True
        self._library = library
        self.end_of_text = end_of_text
        self.vocab_size: int = max(library.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, dtype=np.uint32) for one in found]

    def decode(self, ids: Iterable[int], *, special: bool = True) -> str:
        """special: with the special tokens' names."""
        return self._library.decode([int(token) for token in ids], skip_special_tokens=not special)

    def describe(self) -> str:
        return f"{self.name} ({self.vocab_size:,} tokens)"

    def library_form(self) -> Tokenizer:
        """A copy of the library's tokenizer, in which a special token that a text spells is that token."""
        return Tokenizer.from_str(self._library.to_str())

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Also loads as transformers.AutoTokenizer.from_pretrained(folder)."""
        write_atomically(Path(folder, FILE), self._library.to_str())
        write_atomically(Path(folder, CONFIG), json.dumps({**self.config, MARK: {"kind": self.kind}}, indent=1))


def read_tokenizer(path: Path, read: Callable[[str], Any] = Tokenizer.from_file) -> Any:
    """What `read` makes of a file. Raises UserError, naming the file, which the library's errors do not."""
    try:
        return read(str(path))
    except Exception as error:  # the library raises no other
        raise UserError(f"the tokenizer {path} cannot be read: {first_line(error)}.") from error


# The library's threads do not survive a fork: where they have run, a process forked from this one (a DataLoader's
# worker) prints a warning while the variable is not set (tokenizers 0.22).
def _before_fork() -> None:
    os.environ.setdefault(PARALLELISM, "False")  # capitalised: the library reads it as "false", and we know it as ours


def _after_fork() -> None:
    if os.environ.get(PARALLELISM) == "False":
        del os.environ[PARALLELISM]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)
