"""Choose, make and load tokenizers: bytes, a BPE trained on the corpus, GPT-2's own, or a
Hugging Face folder's."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from flashtrain.data.bpe import ADDED, BPETokenizer, byte_level, gpt2_tokenizer
from flashtrain.data.library_tokenizer import CONFIG, MARK, LibraryTokenizer, read_if_there
from flashtrain.errors import UserError, unknown

KINDS = ("bytes", "bpe", "gpt2")
BYTES = 256
NONE = "none"  # the kind of token files without a tokenizer


@runtime_checkable
class Tokenizer(Protocol):
    """A tokenizer, as data modules and text generation use it."""

    vocab_size: int  # number of ids, which are 0 to vocab_size - 1
    end_of_text: int  # id that ends every document

    def encode(self, text: str) -> list[int]:
        """Encode a text, without end_of_text. The characters "<|endoftext|>" are ordinary text."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode several texts, as one integer array each."""

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to a text. Bytes that are not UTF-8 become U+FFFD, and end_of_text
        becomes "<|endoftext|>"."""

    def describe(self) -> str:
        """Return the name and size for messages, such as "bytes (257 tokens)"."""

    def fingerprint(self) -> str:
        """Return a text that is the same for tokenizers that give the same ids."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the files that load_tokenizer reads, and make the folder if it is missing."""


class ByteTokenizer(LibraryTokenizer):
    """A tokenizer whose tokens are the 256 bytes, and id 256, which ends a text; for the
    `tokenizers` library a byte-level BPE without merges."""

    kind, name = "bytes", "bytes"
    config = ADDED

    def __init__(self) -> None:
        # GPT-2's alphabet, in which a printable byte is its own character and the
        # others follow from 256 on.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(BYTES) if byte not in printable]
        symbols = {byte: chr(byte) for byte in printable} | {
            byte: chr(BYTES + n) for n, byte in enumerate(others)
        }
        super().__init__(byte_level({symbols[byte]: byte for byte in range(BYTES)}, []), BYTES)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        if not self.letters:
            return super().encode_batch(texts)
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def fingerprint(self) -> str:
        return hashlib.sha256(b"bytes 257").hexdigest()


@dataclass(frozen=True)
class TokenizerSpec:
    """A description of a tokenizer (its kind, files and size), from which
    make_tokenizer makes it."""

    # "bytes", "bpe" (trained on the corpus), "gpt2", or the path of a Hugging Face folder.
    kind: str = "gpt2"
    vocab_size: int = 50257  # of a trained "bpe"
    vocab: str | None = None  # GPT-2's vocabulary file (None: from the hub)
    merges: str | None = None  # GPT-2's merges file (None: from the hub)
    sample_bytes: int = 200_000_000  # a "bpe" is trained on the first so many bytes of the corpus
    begin_of_text: bool = True  # see huggingface_tokenizer

    def __post_init__(self) -> None:
        if self.kind not in (*KINDS, NONE) and not Path(self.kind).expanduser().is_dir():
            raise unknown(
                "tokenizer", self.kind, KINDS, listed=(*KINDS, "a folder with tokenizer.json")
            )

    def key(self) -> str:
        """Return a text that identifies the tokenizer: specs with equal keys make tokenizers with
        equal tokens. A file counts by its content."""
        if self.kind == "bytes":
            return "bytes"
        if self.kind == "bpe":
            return f"bpe {self.vocab_size} of the first {self.sample_bytes} bytes"
        if self.kind != "gpt2":
            # Most runs need none of it.
            from flashtrain.data.huggingface_tokenizer import folder_version

            version = folder_version(self.kind)
            begin = _put_before(self.kind, version) if self.begin_of_text else ()
            return f"huggingface {version}{f' after {begin}' if begin else ''}"
        if self.vocab is None or self.merges is None:
            return "gpt2 from the hub"
        paths = (Path(path).expanduser() for path in (self.vocab, self.merges))
        contents = "\0".join(path.read_text(encoding="utf-8") for path in paths)
        return f"gpt2 {hashlib.sha256(contents.encode()).hexdigest()}"


def make_tokenizer(
    spec: TokenizerSpec | Tokenizer, documents: Callable[[], Iterable[str]] = tuple
) -> Tokenizer:
    """Make the tokenizer of a spec.

    Args:
        spec: Describes the tokenizer; a Tokenizer is returned as it is.
        documents: Function that returns the texts to train a "bpe" on; the
            other kinds do not call it.

    Raises:
        UserError: The files of the tokenizer are missing or damaged.
    """
    if not isinstance(spec, TokenizerSpec):
        return spec
    if spec.kind == "bytes":
        return ByteTokenizer()
    if spec.kind == "bpe":
        return BPETokenizer.train(first_bytes(documents(), spec.sample_bytes), spec.vocab_size)
    if spec.kind != "gpt2":
        return huggingface_tokenizer(spec.kind, begin_of_text=spec.begin_of_text)
    return gpt2_tokenizer(vocab=spec.vocab, merges=spec.merges)


def huggingface_tokenizer(
    folder: str | os.PathLike[str], *, begin_of_text: bool = True
) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder, which may be one that
    flashtrain saved or exported.

    No code in the folder is run. What was changed after flashtrain wrote it (tokens were added, a
    chat template) is read as a Hugging Face tokenizer.

    Args:
        folder: The folder.
        begin_of_text: Whether documents and prompts begin with the ids that
            AutoTokenizer puts before a text.

    Raises:
        UserError: The folder has no tokenizer, a damaged one, or one without an end of text.
    """
    from flashtrain.data.huggingface_tokenizer import HuggingFaceTokenizer, as_huggingface

    folder = Path(folder).expanduser()
    found = load_tokenizer(folder) if holds_tokenizer(folder) else HuggingFaceTokenizer.load(folder)
    if isinstance(found, ByteTokenizer | BPETokenizer):  # transformers keeps the mark
        theirs = HuggingFaceTokenizer.load(folder)
        written = as_huggingface(found).fingerprint() == theirs.fingerprint()
        found = found if written and "chat_template" not in theirs.config else theirs
    return found if begin_of_text else without_begin(found)


@cache
def _put_before(folder: str, version: str) -> tuple[int, ...]:
    """Return the ids that AutoTokenizer puts before a text; `version` (folder_version) is only part
    of the cache's key."""
    return tuple(begin_of(huggingface_tokenizer(folder)))


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer that `save` or an export wrote to this folder. Raises
    UserError if there is none."""
    folder = Path(folder)
    saved = _saved(folder)
    kind = saved.get("kind")
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "bpe":
        return BPETokenizer.load(folder)
    if kind == "wordpiece":
        from flashtrain.data.wordpiece import WordPieceTokenizer

        return cast(Tokenizer, WordPieceTokenizer.load(folder))
    if kind == "huggingface":
        from flashtrain.data.huggingface_tokenizer import HuggingFaceTokenizer

        return HuggingFaceTokenizer.load(folder)
    if kind == "ids":
        from flashtrain.data.token_ids import TokenIds

        return TokenIds(saved["vocab_size"], saved["end_of_text"])
    raise UserError(
        f"no tokenizer saved by flashtrain in {folder}: expected tokenizer_config.json."
    )


def begin_of(tokenizer: Tokenizer) -> Sequence[int]:
    """Return the ids that the tokenizer puts before a text, as AutoTokenizer does; empty
    for bytes, bpe and gpt2."""
    return getattr(tokenizer, "begin_of_text", ())


def without_begin(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer if it puts nothing before a text, else a copy that does not."""
    return cast(Any, tokenizer).without_begin() if begin_of(tokenizer) else tokenizer


def as_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a prompt, with the ids that the tokenizer puts before a text."""
    return [*begin_of(tokenizer), *tokenizer.encode(text)]


def as_document(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """Return the int64 ids of a document: those put before a text, the text's own
    `ids`, and end_of_text."""
    return np.concatenate(
        (begin_of(tokenizer), ids, [tokenizer.end_of_text]), dtype=np.int64, casting="unsafe"
    )


def known_end(tokenizer: Tokenizer) -> int | None:
    """Return the id that ends a text; None if the tokenizer does not know it, as for token files
    without a tokenizer."""
    return tokenizer.end_of_text if tokenizer.end_of_text >= 0 else None


def holds_tokenizer(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds a tokenizer that flashtrain saved, as
    load_tokenizer reads it."""
    return bool(_saved(Path(folder)))


def check_same_tokens(tokenizer: Tokenizer, folder: Path) -> None:
    """Raise UserError if a tokenizer trained on the text is not the one that a run saved in
    `folder`, because the text has changed."""
    trained = getattr(tokenizer, "kind", None) in ("bpe", "wordpiece") and holds_tokenizer(folder)
    if trained and load_tokenizer(folder).fingerprint() != tokenizer.fingerprint():
        raise UserError(
            f"the text has changed since {folder.parent} began: a tokenizer that is trained on it "
            "gives other tokens than the model's. Resume with the text as it was, or train on with "
            f"weights={folder.parent}."
        )


def _saved(folder: Path) -> dict[str, Any]:
    """Return flashtrain's entry in the folder's tokenizer_config.json; an empty dict if there is
    none."""
    return read_if_there(folder / CONFIG).get(MARK, {})


def first_bytes(documents: Iterable[str], limit: int) -> Iterator[str]:
    """Yield the first documents until `limit` bytes of text are reached; the
    last document is cut."""
    taken = 0
    for document in documents:
        if taken >= limit:
            return
        piece = document[: limit - taken]
        taken += len(piece.encode())
        yield piece
