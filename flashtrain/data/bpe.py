"""Byte-pair encoding over bytes, as GPT-2 has it, run by the Hugging Face `tokenizers` library.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from flashtrain.errors import UserError, first_line
from flashtrain.files.disk import write_atomically
from flashtrain.files.json_files import read_json

log = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
BYTES = 256

LONGEST_PIECE = 1_000_000
"""Characters handed to the library at once; its working memory is some hundred bytes a token."""
PIECES_AT_ONCE = 16

HUB_REPOSITORY = "openai-community/gpt2"

PARALLELISM = "TOKENIZERS_PARALLELISM"
OFF = "False"  # capitalised: the library reads it as "false", and we recognise it as our own
_threads_ran_in: int | None = None


class BPETokenizer:
    """A byte-level BPE with the end of text as its one special token. Made by train, load or gpt2_tokenizer."""

    kind = "bpe"

    def __init__(self, tokenizer: RustTokenizer) -> None:
        # A text that spells "<|endoftext|>" must not end the document it stands in.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.end_of_text: int = tokenizer.get_vocab(with_added_tokens=True)[END_OF_TEXT]
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def train(cls, documents: Iterable[str], vocab_size: int) -> BPETokenizer:
        """Learn merges until there are vocab_size tokens (fewer when the text has no more to give).

        vocab_size: at least 257, the bytes and the end of text.
        """
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer = _byte_level(models.BPE())
        pieces = (piece for document in documents for piece in split_long(document))
        log.info("training a BPE of %s tokens on the text", f"{vocab_size:,}")
        with rust_threads():
            tokenizer.train_from_iterator(pieces, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> BPETokenizer:
        """Read tokenizer.json, as `save` wrote it, from the folder."""
        path = Path(folder) / "tokenizer.json"
        model = read_json(path)["model"]
        merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
        return cls(_from_vocabulary(model["vocab"], merges, str(path)))

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        pieces = ((number, piece) for number, text in enumerate(texts) for piece in split_long(text))
        found: list[list[np.ndarray]] = [[] for _ in texts]
        with rust_threads():
            for group in _groups(pieces):
                encodings = self._tokenizer.encode_batch_fast([piece for _, piece in group])
                for (number, _), encoding in zip(group, encodings, strict=True):
                    found[number].append(np.asarray(encoding.ids, dtype=np.uint32))
        return [np.concatenate(parts) if parts else np.empty(0, np.uint32) for parts in found]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    def library_form(self) -> RustTokenizer:
        """A copy of the Hugging Face library's tokenizer, in which "<|endoftext|>" in a text is the special token."""
        return RustTokenizer.from_str(self._tokenizer.to_str())

    def describe(self) -> str:
        return f"byte-level BPE ({self.vocab_size:,} tokens)"

    def fingerprint(self) -> str:
        model = json.loads(self._tokenizer.to_str())["model"]
        # Files of older versions of the library write a merge as "a b", newer ones as ["a", "b"].
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        content = json.dumps([sorted(self._tokenizer.get_vocab().items()), merges])
        return hashlib.sha256(content.encode()).hexdigest()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Also loads as transformers' PreTrainedTokenizerFast.from_pretrained(folder)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "unk_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "flashtrain": {"kind": self.kind},
        }
        write_atomically(folder / "tokenizer.json", self._tokenizer.to_str())
        write_atomically(folder / "tokenizer_config.json", json.dumps(config, indent=1))


def gpt2_tokenizer(
    vocab: str | os.PathLike[str] | None = None, merges: str | os.PathLike[str] | None = None
) -> BPETokenizer:
    """GPT-2's own tokenizer, id for id (50,257 tokens, end of text 50256).

    vocab, merges: its two files, as published (encoder.json, vocab.bpe) or on the hub (vocab.json, merges.txt); with
    neither they come from the hub. Raises UserError for files that are no byte-level BPE, and without network.
    """
    if vocab is None and merges is None:
        vocab, merges = _download("vocab.json"), _download("merges.txt")
    vocabulary = read_json(_expanded(vocab))
    lines = _expanded(merges).read_text(encoding="utf-8").splitlines()
    pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    return BPETokenizer(_from_vocabulary(vocabulary, pairs, f"{vocab} with {merges}"))


def gpt2_files_version(vocab: str | os.PathLike[str] | None, merges: str | os.PathLike[str] | None) -> str:
    """A hash of the two files' content."""
    texts = (_expanded(path).read_text(encoding="utf-8") for path in (vocab, merges))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _expanded(path: str | os.PathLike[str] | None) -> Path:
    """The path of one of GPT-2's two files, which are given together."""
    if path is None:
        raise UserError("GPT-2's tokenizer needs both files: data.vocab and data.merges.")
    return Path(path).expanduser()


def split_long(text: str, longest: int = LONGEST_PIECE) -> Iterator[str]:
    """Cut a long text where no token can span the cut, so that its pieces' tokens are the text's tokens.

    GPT-2's pattern never matches across a step from other characters to white space; the cut is made at the last such
    step before `longest` characters. A run that long without any (no ordinary text) is cut where it stands.
    """
    begin = 0
    while len(text) - begin > longest:
        cut = begin + longest
        while cut > begin and not (text[cut] in " \t\r\n" and not text[cut - 1].isspace()):
            cut -= 1
        if cut == begin:
            cut = begin + longest
        yield text[begin:cut]
        begin = cut
    if begin < len(text):
        yield text[begin:]


@contextlib.contextmanager
def rust_threads() -> Iterator[None]:
    """Let the library use all cores here, then switch its threads off, unless the user has decided already.

    Once its threads have run in a process, every later fork of it (DataLoader workers) prints a warning while the
    variable is not set, and hangs when it encodes with the threads on: they do not survive a fork. So the variable is
    "false" outside, and stays so in processes forked from one whose threads have run.
    """
    global _threads_ran_in
    decided_by_user = os.environ.get(PARALLELISM, OFF) != OFF
    if decided_by_user or _threads_ran_in not in (None, os.getpid()):
        yield
        return
    _threads_ran_in = os.getpid()
    os.environ[PARALLELISM] = "true"
    try:
        yield
    finally:
        os.environ[PARALLELISM] = OFF


def byte_level_without_merges() -> RustTokenizer:
    """The bytes of UTF-8 as ids 0 to 255, and 256 for the end of text."""
    # GPT-2's alphabet, in which a printable byte is its own character and the others follow from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(BYTES) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable} | {byte: chr(BYTES + n) for n, byte in enumerate(others)}
    return _from_vocabulary({symbols[byte]: byte for byte in range(BYTES)}, [], "the bytes")


def _byte_level(model: models.BPE) -> RustTokenizer:
    tokenizer = RustTokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _from_vocabulary(vocabulary: Any, merges: Any, where: str) -> RustTokenizer:
    """UserError: no vocabulary of bytes, of which the library would leave out what it does not know, silently."""
    missing = [symbol for symbol in pre_tokenizers.ByteLevel.alphabet() if symbol not in vocabulary]
    if missing:
        raise UserError(f"{where}: no byte-level vocabulary; {len(missing)} of its 256 byte symbols are missing.")
    try:
        model = models.BPE(vocab=vocabulary, merges=merges)
    except Exception as error:  # the library raises no other, and names no file
        raise UserError(f"{where}: {first_line(error)}.") from error
    tokenizer = _byte_level(model)
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False, special=True)])
    return tokenizer


def _download(name: str) -> str:
    import huggingface_hub  # a dependency of tokenizers; imported here since it is slow
    import huggingface_hub.errors

    try:
        return huggingface_hub.hf_hub_download(HUB_REPOSITORY, name)
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise UserError(
            f"GPT-2's tokenizer could not be had from the hub ({HUB_REPOSITORY}); give its files with vocab=... and "
            "merges=..., or use the tokenizer 'bpe' or 'bytes', which need no download."
        ) from error


def _groups(pieces: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Up to PIECES_AT_ONCE long pieces, or as many short ones as are together no longer."""
    group: list[tuple[int, str]] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece[1])
        if size >= PIECES_AT_ONCE * LONGEST_PIECE:
            yield group
            group, size = [], 0
    if group:
        yield group
