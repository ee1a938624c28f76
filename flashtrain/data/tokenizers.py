"""From text to token ids and back: raw bytes, a BPE trained on the corpus, GPT-2's own, or a Hugging Face folder's."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from flashtrain.data.bpe import ADDED, BPETokenizer, byte_level, gpt2_files_version, gpt2_tokenizer
from flashtrain.data.library_tokenizer import CONFIG, MARK, LibraryTokenizer
from flashtrain.errors import UserError, unknown
from flashtrain.files.json_files import read_json

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "Tokenizer",
    "TokenizerSpec",
    "gpt2_tokenizer",
    "huggingface_tokenizer",
    "load_tokenizer",
    "make_tokenizer",
]


KINDS = ("bytes", "bpe", "gpt2")
BYTES = 256
NONE = "none"  # of token files that name no tokenizer


@runtime_checkable
class Tokenizer(Protocol):
    """What the data path and text generation need from a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 to vocab_size - 1."""
        ...

    @property
    def end_of_text(self) -> int:
        """The id that closes every document."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without end_of_text; the characters of "<|endoftext|>" are text like any other."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of many texts at once, one integer array each."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Bytes that are no UTF-8 become U+FFFD; end_of_text reads "<|endoftext|>"."""
        ...

    def describe(self) -> str:
        """A few words for people."""
        ...

    def fingerprint(self) -> str:
        """The same for tokenizers that give the same ids."""
        ...

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write what load_tokenizer reads. The folder is made where missing."""
        ...


class ByteTokenizer(LibraryTokenizer):
    """The 256 bytes of UTF-8, and id 256 for the end of a text. To the library: a byte-level BPE that never merges."""

    kind, name = "bytes", "bytes"
    config = ADDED

    def __init__(self) -> None:
        # GPT-2's alphabet, in which a printable byte is its own character and the others follow from 256 on.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(BYTES) if byte not in printable]
        symbols = {byte: chr(byte) for byte in printable} | {byte: chr(BYTES + n) for n, byte in enumerate(others)}
        super().__init__(byte_level({symbols[byte]: byte for byte in range(BYTES)}, []), BYTES)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def fingerprint(self) -> str:
        return hashlib.sha256(b"bytes 257").hexdigest()


@dataclass(frozen=True)
class TokenizerSpec:
    """Which tokenizer to make.

    kind: "bytes", "bpe" (trained on the corpus), "gpt2", or a folder's path (huggingface_tokenizer). vocab_size: how
    many tokens a trained "bpe" has. vocab, merges: GPT-2's two files; without them they come from the hub.
    sample_bytes: a "bpe" is trained on the first so many bytes of the corpus. begin_of_text: see huggingface_tokenizer.
    """

    kind: str = "gpt2"
    vocab_size: int = 50257
    vocab: str | None = None
    merges: str | None = None
    sample_bytes: int = 200_000_000
    begin_of_text: bool = True

    def __post_init__(self) -> None:
        if self.kind not in (*KINDS, NONE) and not Path(self.kind).expanduser().is_dir():
            raise unknown("tokenizer", self.kind, KINDS, listed=(*KINDS, "a folder with tokenizer.json"))

    @property
    def short_name(self) -> str:
        """Of any folder "huggingface"."""
        return self.kind if self.kind in (*KINDS, NONE) else "huggingface"

    def key(self) -> str:
        """What decides the ids, as text: equal keys on one corpus give equal tokens. Paths count by their content."""
        if self.kind == "bytes":
            return "bytes"
        if self.kind == "bpe":
            return f"bpe {self.vocab_size} of the first {self.sample_bytes} bytes"
        if self.kind != "gpt2":
            from flashtrain.data.huggingface_tokenizer import folder_version

            version = folder_version(self.kind)
            begin = _put_before(self.kind, version) if self.begin_of_text else ()
            return f"huggingface {version}{f' after {begin}' if begin else ''}"
        if self.vocab is None and self.merges is None:
            return "gpt2 from the hub"
        return f"gpt2 {gpt2_files_version(self.vocab, self.merges)}"


def make_tokenizer(spec: TokenizerSpec, documents: Callable[[], Iterable[str]] = tuple) -> Tokenizer:
    """The tokenizer that the spec names; only a "bpe" reads documents, to be trained on them. Raises UserError."""
    if spec.kind == "bytes":
        return ByteTokenizer()
    if spec.kind == "bpe":
        return BPETokenizer.train(first_bytes(documents(), spec.sample_bytes), spec.vocab_size)
    if spec.kind != "gpt2":
        return huggingface_tokenizer(spec.kind, begin_of_text=spec.begin_of_text)
    return gpt2_tokenizer(vocab=spec.vocab, merges=spec.merges)


def huggingface_tokenizer(folder: str | os.PathLike[str], *, begin_of_text: bool = True) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: of a model, or one that flashtrain saved or exported. Raises UserError.

    Its own end of text closes the documents. No code in the folder runs.
    begin_of_text: whether what AutoTokenizer puts before a text stands before each document and prompt.
    """
    from flashtrain.data.huggingface_tokenizer import HuggingFaceTokenizer  # most runs need none of it

    folder = Path(folder).expanduser()
    found = load_tokenizer(folder) if holds_tokenizer(folder) else HuggingFaceTokenizer.load(folder)
    return found if begin_of_text else without_begin(found)


@cache
def _put_before(folder: str, version: str) -> tuple[int, ...]:
    """version: of the folder's files, which may change."""
    return tuple(begin_of(huggingface_tokenizer(folder)))


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that `save` or an export wrote to this folder. Raises UserError where there is none."""
    folder = Path(folder)
    saved = _saved(folder)
    kind = saved.get("kind")
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "bpe":
        return BPETokenizer.load(folder)
    if kind == "wordpiece":
        from flashtrain.data.wordpiece import WordPieceTokenizer

        return cast(Tokenizer, WordPieceTokenizer.beside(folder))
    if kind == "huggingface":
        from flashtrain.data.huggingface_tokenizer import HuggingFaceTokenizer

        return HuggingFaceTokenizer.load(folder)
    if kind == "ids":
        from flashtrain.data.token_ids import TokenIds

        return TokenIds(saved["vocab_size"], saved["end_of_text"])
    raise UserError(f"no tokenizer saved by flashtrain in {folder}.")


def begin_of(tokenizer: Tokenizer) -> Sequence[int]:
    """The ids that stand before a text: what transformers' AutoTokenizer puts there, none of bytes, bpe and gpt2."""
    return getattr(tokenizer, "begin_of_text", ())


def without_begin(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with nothing before a text."""
    return cast(Any, tokenizer).without_begin() if begin_of(tokenizer) else tokenizer


def as_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that a model goes on with, after what stands before a text."""
    return [*begin_of(tokenizer), *tokenizer.encode(text)]


def as_document(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """A text's ids, int64, between what stands before a text and the end of text."""
    return np.concatenate((begin_of(tokenizer), ids, [tokenizer.end_of_text]), dtype=np.int64, casting="unsafe")


def known_end(tokenizer: Tokenizer) -> int | None:
    """The id that closes a text; None where token files name neither a tokenizer nor an end."""
    return tokenizer.end_of_text if tokenizer.end_of_text >= 0 else None


def holds_tokenizer(folder: str | os.PathLike[str]) -> bool:
    """Whether load_tokenizer finds one there; False of a Hugging Face folder."""
    return bool(_saved(Path(folder)))


def _saved(folder: Path) -> dict[str, Any]:
    """What a tokenizer_config.json says that flashtrain saved; nothing where it is another program's, or not there."""
    return read_json(folder / CONFIG).get(MARK, {}) if (folder / CONFIG).is_file() else {}


def first_bytes(documents: Iterable[str], limit: int) -> Iterator[str]:
    """The documents up to so many bytes, the last one cut."""
    taken = 0
    for document in documents:
        if taken >= limit:
            return
        piece = document[: limit - taken]
        taken += len(piece.encode())
        yield piece
