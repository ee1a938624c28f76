"""The flat token file: a corpus as one array of token ids on disk, with the offsets of its documents.

A cache is a folder that appears whole or not at all:

    tokens.bin       every document's ids in order, each document closed by end_of_text; uint16 or uint32
    documents.npy    int64, one more than documents: document d is tokens[documents[d]:documents[d + 1]]
    marks.bin        uint8, one a token, of sources that mark their tokens (chat: LABELLED, GOES_ON)
    tokenizer/       the tokenizer that made them (tokenizers.load_tokenizer reads it)
    meta.json        format, source, tokenizer, counts, and the size of each file above

Its name holds a hash of what decides the content: the format, the source's fingerprint, the tokenizer. So a changed
source or tokenizer is another folder, and an unchanged one is found again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from flashtrain.data.tokenizers import Tokenizer, TokenizerSpec, load_tokenizer
from flashtrain.files.caches import default_cache_dir
from flashtrain.files.json_files import read_json

log = logging.getLogger(__name__)

FORMAT = 1
TOKENS, DOCUMENTS, META = "tokens.bin", "documents.npy", "meta.json"
MARKS = "marks.bin"
LABELLED = 1  # of a token: it is one to learn
GOES_ON = 2  # of a document's first token: the document is of the same conversation as the one before


class DamagedCacheError(Exception):
    """A cache folder that is not what its builder left; its text says in which way."""


@dataclass(frozen=True)
class CacheMeta:
    """What meta.json holds. Sizes are in bytes; `text_bytes` is the corpus as UTF-8."""

    format: int
    source: str
    source_fingerprint: str
    tokenizer_key: str
    tokenizer_fingerprint: str
    dtype: str
    tokens: int
    documents: int
    text_bytes: int
    files: dict[str, dict[str, int]]

    def write(self, folder: Path) -> None:
        (folder / META).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> CacheMeta:
        """Raises DamagedCacheError where it is missing, or no builder's."""
        try:
            return cls(**read_json(folder / META))
        except (OSError, ValueError, TypeError) as error:
            raise DamagedCacheError(f"{META} is missing or cannot be understood: {error}") from error


@dataclass(frozen=True)
class TokenCache:
    """An open cache. `folder` is where it lies; `meta` is what its builder noted."""

    folder: Path
    meta: CacheMeta

    @property
    def tokens_path(self) -> Path:
        return self.folder / TOKENS

    @property
    def marks_path(self) -> Path:
        return self.folder / MARKS

    @cached_property
    def offsets(self) -> np.ndarray:
        """(documents + 1,) int64, memory-mapped: where each document begins and ends in the token file."""
        return np.load(self.folder / DOCUMENTS, mmap_mode="r", allow_pickle=False)

    @cached_property
    def tokens(self) -> np.ndarray:
        """(tokens,) uint16 or uint32, memory-mapped: the whole corpus."""
        return np.memmap(self.tokens_path, dtype=self.meta.dtype, mode="r")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder / "tokenizer")


def open_cache(folder: str | os.PathLike[str]) -> TokenCache:
    """Open a cache folder. Raises DamagedCacheError where a file is missing or cut."""
    folder = Path(folder)
    meta = CacheMeta.read(folder)
    for name, noted in meta.files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != noted["bytes"]:
            raise DamagedCacheError(f"{name} {'is missing' if size is None else f'has {size:,} bytes'}")
    return TokenCache(folder, meta)


def folder_of(fingerprint: str, tokenizer: TokenizerSpec | Tokenizer, cache_dir: str | os.PathLike[str] | None) -> Path:
    """Where the cache of a source of this fingerprint lies, whether or not it exists yet."""
    parts = (FORMAT, fingerprint, tokenizer_key(tokenizer))
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    kind = tokenizer.short_name if isinstance(tokenizer, TokenizerSpec) else "tokens"
    base = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    return base / f"{kind}-{digest}"  # wherever the text lies: meta.json says which it is


def tokenizer_key(tokenizer: TokenizerSpec | Tokenizer) -> str:
    """What of the tokenizer decides the tokens, known without training or downloading it."""
    return tokenizer.key() if isinstance(tokenizer, TokenizerSpec) else tokenizer.fingerprint()


def open_if_whole(folder: Path, *, warn: bool = False) -> TokenCache | None:
    """The cache, or None where it has to be built. warn: say so in a line where it is damaged."""
    if not folder.exists():
        return None
    try:
        return open_cache(folder)
    except DamagedCacheError as damage:
        if warn:
            log.warning("the token cache %s is damaged (%s): building it again", folder, damage)
        return None
