"""Byte-level byte-pair encoding as in GPT-2, run by the Hugging Face `tokenizers` library.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from flashtrain.data.library_tokenizer import FILE, TAKEN_AS_IT_IS, LibraryTokenizer, read_tokenizer
from flashtrain.errors import UserError

log = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
ADDED = {
    **TAKEN_AS_IT_IS,
    "bos_token": END_OF_TEXT,
    "eos_token": END_OF_TEXT,
    "unk_token": END_OF_TEXT,
}

# The library's working memory is some hundred bytes a token.
MAX_PIECE_CHARACTERS = 1_000_000
PIECES_CHUNK = 16  # pieces that are encoded at once

HUB_REPOSITORY = "openai-community/gpt2"


class BPETokenizer(LibraryTokenizer):
    """A byte-level BPE with one special token, the end of text. Made by `train`,
    `load` or `gpt2_tokenizer`."""

    kind, name = "bpe", "byte-level BPE"
    config = ADDED

    def __init__(self, library: Tokenizer) -> None:
        super().__init__(library, library.get_vocab()[END_OF_TEXT])

    @classmethod
    def train(cls, documents: Iterable[str], vocab_size: int) -> BPETokenizer:
        """Train a tokenizer: learn merges until it has vocab_size tokens (257 or more), or
        no more can be learnt."""
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        library = _byte_level(models.BPE())
        log.info("training a BPE tokenizer of %s tokens on the text", f"{vocab_size:,}")
        library.train_from_iterator(
            (piece for document in documents for piece in split_long(document)), trainer
        )
        return cls(library)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> BPETokenizer:
        """Read the tokenizer.json that `save` or an export wrote to the folder."""
        return cls(_with_end(read_tokenizer(Path(folder, FILE)).model))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        if all(len(text) <= MAX_PIECE_CHARACTERS for text in texts):
            return super().encode_batch(texts)
        return [self._by_pieces(text) for text in texts]

    def _by_pieces(self, text: str) -> np.ndarray:
        pieces, found = list(split_long(text)), [np.empty(0, np.uint32)]
        for first in range(0, len(pieces), PIECES_CHUNK):
            found += super().encode_batch(pieces[first : first + PIECES_CHUNK])
        return np.concatenate(found)

    def fingerprint(self) -> str:
        model = json.loads(self._library.to_str())["model"]
        merges = [" ".join(pair) for pair in model["merges"]]
        content = json.dumps([sorted(self._library.get_vocab().items()), merges])
        return hashlib.sha256(content.encode()).hexdigest()


def gpt2_tokenizer(
    vocab: str | os.PathLike[str] | None = None, merges: str | os.PathLike[str] | None = None
) -> BPETokenizer:
    """Read GPT-2's own tokenizer (50,257 tokens, end of text 50256).

    Args:
        vocab: Path of its vocabulary: encoder.json as published, or vocab.json of the hub. If
            `vocab` or `merges` is None, both files are downloaded from the hub.
        merges: Path of its merges: vocab.bpe as published, or merges.txt of the hub.

    Raises:
        UserError: The files are not a byte-level BPE.
    """
    if vocab is None or merges is None:
        # A dependency of tokenizers; imported here since it is slow.
        from huggingface_hub import hf_hub_download

        where = f"{HUB_REPOSITORY} of the hub (local: data.vocab=FILE data.merges=FILE)"
        names = ("vocab.json", "merges.txt")
        vocab, merges = read_tokenizer(
            where, lambda _: [hf_hub_download(HUB_REPOSITORY, name) for name in names]
        )
    paths = [str(Path(path).expanduser()) for path in (vocab, merges)]
    return BPETokenizer(
        read_tokenizer(Path(paths[0]), lambda _: byte_level(*models.BPE.read_file(*paths)))
    )


def split_long(text: str, max_characters: int = MAX_PIECE_CHARACTERS) -> Iterator[str]:
    """Yield a long text in parts, cut where no token can span the cut, so that the tokens of the
    parts together are those of the whole text.

    GPT-2's pattern never matches across a change from other characters to white space. The cut is
    made at the last such change before `max_characters`; text without one, which is not ordinary
    text, is cut at `max_characters`.
    """
    begin = 0
    while len(text) - begin > max_characters:
        cut = begin + max_characters
        while cut > begin and not (text[cut] in " \t\r\n" and not text[cut - 1].isspace()):
            cut -= 1
        if cut == begin:
            cut = begin + max_characters
        yield text[begin:cut]
        begin = cut
    if begin < len(text):
        yield text[begin:]


def byte_level(vocabulary: dict[str, int], merges: Any) -> Tokenizer:
    """Make a byte-level BPE from token -> id and its merges. Raises UserError if one of the
    256 bytes has no token."""
    # The library would silently drop the bytes that the vocabulary does not have.
    missing = [symbol for symbol in pre_tokenizers.ByteLevel.alphabet() if symbol not in vocabulary]
    if missing:
        raise UserError(
            "expected a byte-level vocabulary (GPT-2's): "
            f"{len(missing)} of 256 byte symbols are missing."
        )
    return _with_end(models.BPE(vocab=vocabulary, merges=merges))


def _with_end(model: models.BPE) -> Tokenizer:
    library = _byte_level(model)
    library.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False, special=True)])
    return library


def _byte_level(model: models.BPE) -> Tokenizer:
    library = Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library
