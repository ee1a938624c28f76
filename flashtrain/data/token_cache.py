"""The flat token file: a corpus as one array of token ids on disk, with the offsets of its documents.

A cache is a folder that appears whole or not at all:

    tokens.bin       every document's ids in order, each document closed by end_of_text; uint16 or uint32
    documents.npy    int64, one more than documents: document d is tokens[documents[d]:documents[d + 1]]
    tokenizer/       the tokenizer that made them (tokenizers.load_tokenizer reads it)
    meta.json        format, source, tokenizer, counts, and the size and checksum of each file above

Its name holds a hash of what decides the content: the format, the source's fingerprint, the tokenizer. So a changed
source or tokenizer is another folder, and an unchanged one is found again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from flashtrain.data.cache_folder import default_cache_dir, only_writer
from flashtrain.data.sources import TextSource
from flashtrain.data.tokenizers import Tokenizer, TokenizerSpec, load_tokenizer

log = logging.getLogger(__name__)

FORMAT = 1

WHOLE_CHECKSUM_LIMIT = 256 * 2**20
"""Files up to this size (bytes) are checked whole; longer ones by their size and SAMPLED_BLOCKS blocks."""
SAMPLED_BLOCKS = 256
BLOCK = 64 * 2**10


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
    files: dict[str, dict[str, int | str]]

    def write(self, folder: Path) -> None:
        (folder / "meta.json").write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> CacheMeta:
        """Raises DamagedCacheError."""
        try:
            return cls(**json.loads((folder / "meta.json").read_text(encoding="utf-8")))
        except OSError as error:
            raise DamagedCacheError("meta.json is missing or cannot be read") from error
        except (ValueError, TypeError) as error:
            raise DamagedCacheError("meta.json cannot be understood") from error


@dataclass(frozen=True)
class TokenCache:
    """An open cache. `folder` is where it lies; `meta` is what its builder noted."""

    folder: Path
    meta: CacheMeta

    @property
    def tokens_path(self) -> Path:
        return self.folder / "tokens.bin"

    @cached_property
    def offsets(self) -> np.ndarray:
        """(documents + 1,) int64, memory-mapped: where each document begins and ends in the token file."""
        return np.load(self.folder / "documents.npy", mmap_mode="r", allow_pickle=False)

    @cached_property
    def tokens(self) -> np.ndarray:
        """(tokens,) uint16 or uint32, memory-mapped: the whole corpus."""
        return np.memmap(self.tokens_path, dtype=self.meta.dtype, mode="r")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder / "tokenizer")


def open_or_build(
    source: TextSource, tokenizer: TokenizerSpec | Tokenizer, cache_dir: str | os.PathLike[str] | None = None
) -> TokenCache:
    """The token cache of this source and tokenizer, built first where it is missing or damaged.

    Processes that ask for the same cache at one time build it once: one builds, the others wait and open it.
    cache_dir: where caches live, default_cache_dir() by default. Raises UserError: an empty corpus, a folder that
    cannot be written, a full disk, and whatever the source or the tokenizer object to.
    """
    from flashtrain.data.token_builder import build, remove_leftovers  # it needs this module's names

    folder = cache_folder(source, tokenizer, cache_dir)
    found = _open_checked(folder)
    if found is not None:
        return found
    with only_writer(folder, "cache_dir"):
        found = _open_checked(folder, warn=True)
        remove_leftovers(folder)
        if found is None:
            build(source, tokenizer, folder)
            found = open_cache(folder)
    return found


def open_cache(folder: str | os.PathLike[str]) -> TokenCache:
    """Open and check a cache folder. Raises DamagedCacheError."""
    folder = Path(folder)
    meta = CacheMeta.read(folder)
    for name, noted in meta.files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedCacheError(f"{name} is missing")
        size = path.stat().st_size
        if size != noted["bytes"]:
            raise DamagedCacheError(f"{name} has {size:,} bytes, not {noted['bytes']:,}")
        if checksum(path) != noted["checksum"]:
            raise DamagedCacheError(f"{name} has changed since it was written")
    cache = TokenCache(folder, meta)
    if meta.format != FORMAT or len(cache.offsets) != meta.documents + 1 or len(cache.tokens) != meta.tokens:
        raise DamagedCacheError("meta.json does not fit the files beside it")
    return cache


def cache_folder(
    source: TextSource, tokenizer: TokenizerSpec | Tokenizer, cache_dir: str | os.PathLike[str] | None = None
) -> Path:
    """Where the cache of this source and tokenizer lies, whether or not it exists yet."""
    parts = (FORMAT, source.fingerprint(), tokenizer_key(tokenizer))
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    kind = tokenizer.kind if isinstance(tokenizer, TokenizerSpec) else "tokens"
    words = re.sub(r"[^a-z0-9]+", "-", source.describe().lower()).strip("-")
    base = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    while len(words) > 40 and "-" in words:  # the end of a path says more than its beginning
        words = words.split("-", 1)[1]
    return base / f"{words[-40:]}-{kind}-{digest}"


def tokenizer_key(tokenizer: TokenizerSpec | Tokenizer) -> str:
    """What of the tokenizer decides the tokens, known without training or downloading it."""
    return tokenizer.key() if isinstance(tokenizer, TokenizerSpec) else tokenizer.fingerprint()


def checksum(path: Path) -> str:
    """Hash of the file's bytes; of SAMPLED_BLOCKS evenly spaced blocks, first and last included, in a long file."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        if size <= WHOLE_CHECKSUM_LIMIT:
            while chunk := file.read(2**22):
                digest.update(chunk)
        else:
            for number in range(SAMPLED_BLOCKS):
                file.seek((size - BLOCK) * number // (SAMPLED_BLOCKS - 1))
                digest.update(file.read(BLOCK))
    return digest.hexdigest()


def _open_checked(folder: Path, *, warn: bool = False) -> TokenCache | None:
    if not folder.exists():
        return None
    try:
        return open_cache(folder)
    except DamagedCacheError as damage:
        if warn:
            log.warning("the token cache %s is damaged (%s): building it again", folder, damage)
        return None
