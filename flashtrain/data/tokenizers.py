"""Tokenizers: special tokens, WordPiece, and what gives a tokenizer by its name.

The tokens that BERT adds to a text: [PAD], [CLS], [SEP], [MASK].

BERT's WordPiece tokenizer as Hugging Face folders have it, for weights that were trained with it.

Source: Devlin et al. 2019 (arXiv 1810.04805), run by the Hugging Face `tokenizers` library.

From text to token ids and back: raw bytes, a BPE trained on the corpus, or GPT-2's own BPE.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
from tokenizers import BertWordPieceTokenizer
from tokenizers import Tokenizer as RustTokenizer

from flashtrain.data.bpe import END_OF_TEXT, BPETokenizer, byte_level_without_merges, gpt2_files_version, gpt2_tokenizer
from flashtrain.data.sources import TextSource
from flashtrain.errors import UserError, unknown
from flashtrain.files.disk import write_atomically
from flashtrain.files.foreign_files import read_json_object, read_text

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


KINDS = ("bytes", "bpe", "gpt2")
NONE = "none"  # of token files that name no tokenizer
CONFIG_NAME = "tokenizer_config.json"
MARK = "flashtrain"  # in that file: {"kind": ...}, what the tokenizer is to flashtrain
BELOW = "tokenizer"


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


class ByteTokenizer:
    """The 256 bytes of UTF-8, and id 256 for the end of a text."""

    kind = "bytes"
    vocab_size = 257
    end_of_text = 256

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(_utf8(text), dtype=np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        pieces: list[bytes] = []
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise UserError(f"token {token} is none of the byte tokenizer's: 0 to {self.vocab_size - 1}.")
            pieces.append(END_OF_TEXT.encode() if token == self.end_of_text else bytes((token,)))
        return b"".join(pieces).decode("utf-8", errors="replace")

    def describe(self) -> str:
        return "bytes (257 tokens)"

    def fingerprint(self) -> str:
        return hashlib.sha256(b"bytes 257").hexdigest()

    def library_form(self) -> RustTokenizer:
        """The same ids by the Hugging Face library: a byte-level BPE of 256 bytes that never merges."""
        return byte_level_without_merges()

    def save(self, folder: str | os.PathLike[str]) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {MARK: {"kind": self.kind}}
        write_atomically(folder / CONFIG_NAME, json.dumps(config, indent=1))


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
            raise unknown_tokenizer(self.kind)
        if self.sample_bytes < 1:
            raise UserError(f"sample_bytes={self.sample_bytes} must be at least 1.")

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


def make_tokenizer(spec: TokenizerSpec, source: TextSource) -> Tokenizer:
    """The tokenizer that the spec names; only a "bpe" reads the source. Raises UserError."""
    if spec.kind == "bytes":
        return ByteTokenizer()
    if spec.kind == "bpe":
        return BPETokenizer.train(first_bytes(source.documents(), spec.sample_bytes), spec.vocab_size)
    if spec.kind == NONE:
        raise UserError("data.tokenizer=none is for data=tokens: text needs a tokenizer.")
    if spec.kind != "gpt2":
        return huggingface_tokenizer(spec.kind, begin_of_text=spec.begin_of_text)
    return gpt2_tokenizer(vocab=spec.vocab, merges=spec.merges)


def huggingface_tokenizer(folder: str | os.PathLike[str], *, begin_of_text: bool = True) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: of a model, or one that flashtrain saved or exported. Raises UserError.

    Its own end of text closes the documents. No code in the folder runs.
    begin_of_text: whether what AutoTokenizer puts before a text stands before each document and prompt.
    """
    from flashtrain.data.huggingface_tokenizer import HuggingFaceTokenizer  # most runs need none of it

    if not Path(folder).expanduser().is_dir():
        raise unknown_tokenizer(os.fspath(folder))
    folder = Path(folder).expanduser()
    found = load_tokenizer(folder) if holds_tokenizer(folder) else HuggingFaceTokenizer.load(folder)
    return found if begin_of_text else without_begin(found)


@cache
def _put_before(folder: str, version: str) -> tuple[int, ...]:
    """version: of the folder's files, which may change."""
    return tuple(begin_of(huggingface_tokenizer(folder)))


def unknown_tokenizer(given: str) -> UserError:
    """The error for what is no kind of tokenizer and no folder."""
    return unknown("tokenizer", given, KINDS, listed=(*KINDS, "a folder with tokenizer.json"))


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that `save` or an export wrote to this folder, or below it, where exports had it once.

    Raises UserError when there is none, or it is damaged.
    """
    folder = Path(folder)
    if not (folder / CONFIG_NAME).is_file() and (folder / BELOW / CONFIG_NAME).is_file():
        folder = folder / BELOW
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise UserError(f"no tokenizer in {folder}: {CONFIG_NAME} is missing.")
    kind = _kind(path)
    if kind is None:
        raise UserError(f"{path} does not describe a tokenizer that flashtrain saved.")
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "bpe":
        return BPETokenizer.load(folder)
    if kind == "wordpiece":
        found = WordPieceTokenizer.beside(folder)
        if found is None:
            raise UserError(f"no tokenizer in {folder}: its file is missing.")
        return found
    if kind == "huggingface":
        from flashtrain.data.huggingface_tokenizer import HuggingFaceTokenizer

        return HuggingFaceTokenizer.load(folder)
    if kind == "ids":
        from flashtrain.data.token_ids import TokenIds

        return TokenIds.of(read_json_object(path)[MARK], path)
    raise unknown("kind of saved tokenizer", kind, ("bytes", "bpe", "ids", "wordpiece", "huggingface"))


def begin_of(tokenizer: Tokenizer) -> list[int]:
    """The ids that stand before a text: what transformers' AutoTokenizer puts there, none of bytes, bpe and gpt2."""
    return getattr(tokenizer, "begin_of_text", [])


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
    """Whether load_tokenizer finds one there; False of a Hugging Face folder. UserError: a damaged file."""
    places = (Path(folder), Path(folder) / BELOW)
    return any((place / CONFIG_NAME).is_file() and _kind(place / CONFIG_NAME) is not None for place in places)


def _kind(path: Path) -> str | None:
    """What a tokenizer_config.json says that flashtrain saved; None where it is another program's."""
    told = read_json_object(path).get(MARK)
    kind = told.get("kind") if isinstance(told, dict) else None
    return kind if isinstance(kind, str) else None


def first_bytes(documents: Iterable[str], limit: int) -> Iterator[str]:
    """The documents up to so many bytes, the last one cut."""
    taken = 0
    for document in documents:
        if taken >= limit:
            return
        piece = document[: limit - taken]
        taken += len(piece.encode("utf-8", errors="replace"))
        yield piece


def _utf8(text: str) -> bytes:
    # Half of a surrogate pair, which JSON can hold, has no UTF-8; it becomes "?".
    return text.encode("utf-8", errors="replace")
