"""The flat token file: a corpus as one array of token ids on disk, with the offsets of its documents.

A cache is a folder that appears whole or not at all:

    tokens.bin       every document's ids in order, each document closed by end_of_text; uint16 or uint32
    documents.npy    int64, one more than documents: document d is tokens[documents[d]:documents[d + 1]]
    marks.bin        uint8, one a token, of sources that mark their tokens (chat: LABELLED, GOES_ON)
    tokenizer/       the tokenizer that made them (tokenizers.load_tokenizer reads it)
    meta.json        format, source, tokenizer, counts, and the size and checksum of each file above

Its name holds a hash of what decides the content: the format, the source's fingerprint, the tokenizer. So a changed
source or tokenizer is another folder, and an unchanged one is found again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from flashtrain.data.tokenizers import Tokenizer, TokenizerSpec, load_tokenizer
from flashtrain.errors import UserError
from flashtrain.files.caches import default_cache_dir
from flashtrain.files.foreign_files import read_json_object
from flashtrain.files.npy_files import DamagedArrayError, map_npy

log = logging.getLogger(__name__)

FORMAT = 1

WHOLE_CHECKSUM_LIMIT = 256 * 2**20
"""Files up to this size (bytes) are checked whole; longer ones by their size and SAMPLED_BLOCKS blocks."""
SAMPLED_BLOCKS = 256
BLOCK = 64 * 2**10


TOKENS, DOCUMENTS, META = "tokens.bin", "documents.npy", "meta.json"
DTYPES = ("uint16", "uint32")
MARKS = "marks.bin"
LABELLED = 1  # of a token: it is one to learn
GOES_ON = 2  # of a document's first token: the document is of the same conversation as the one before


class DamagedCacheError(Exception):
    """A cache folder that is not what its builder left; its text says in which way."""


class Expected(NamedTuple):
    """What a cache is asked for: its text and its tokenizer. tokenizer: a Tokenizer knows its vocabulary itself.
    marked: whether its tokens have marks."""

    source_fingerprint: str
    tokenizer_key: str
    tokenizer: TokenizerSpec | Tokenizer
    marked: bool = False


_META_KINDS = {"int": int, "str": str}


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
        (folder / META).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> CacheMeta:
        """Raises DamagedCacheError, for a field that is missing, too many, or no builder's."""
        try:
            told = read_json_object(folder / META)
        except UserError as error:
            raise DamagedCacheError(f"meta.json is missing or cannot be understood: {error}") from error
        kinds = {field.name: _META_KINDS.get(str(field.type), dict) for field in fields(cls)}
        odd = sorted(set(told) ^ set(kinds)) + [
            name for name, kind in kinds.items() if name in told and type(told[name]) is not kind
        ]
        if odd or told["format"] != FORMAT or told["dtype"] not in DTYPES:
            raise DamagedCacheError(f"meta.json is not understood: {odd[0] if odd else 'its format or dtype'}")
        if min(told["tokens"], told["documents"]) < 1 or told["text_bytes"] < 0:
            raise DamagedCacheError("meta.json counts less than nothing")
        for name, noted in told["files"].items():
            _check_noted(name, noted)
        missing = {TOKENS, DOCUMENTS} - set(told["files"])
        if missing:
            raise DamagedCacheError(f"meta.json names no {min(missing)}")
        return cls(**told)


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
        return map_npy(self.folder / DOCUMENTS, "int64")

    @cached_property
    def tokens(self) -> np.ndarray:
        """(tokens,) uint16 or uint32, memory-mapped: the whole corpus."""
        return np.memmap(self.tokens_path, dtype=self.meta.dtype, mode="r")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder / "tokenizer")


def open_cache(folder: str | os.PathLike[str], expected: Expected | None = None) -> TokenCache:
    """Open and check a cache folder; expected: what it was asked for. Raises DamagedCacheError."""
    folder = Path(folder)
    meta = CacheMeta.read(folder)
    if expected is not None and (meta.source_fingerprint, meta.tokenizer_key) != expected[:2]:
        raise DamagedCacheError("it is of another text or tokenizer than its name says")
    if expected is not None and expected.marked != (MARKS in meta.files):
        raise DamagedCacheError(f"meta.json names {'no' if expected.marked else 'a'} {MARKS}")
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
    if meta.files[TOKENS]["bytes"] != meta.tokens * np.dtype(meta.dtype).itemsize:
        raise DamagedCacheError("meta.json does not fit tokens.bin")
    if MARKS in meta.files and meta.files[MARKS]["bytes"] != meta.tokens:
        raise DamagedCacheError(f"meta.json does not fit {MARKS}")
    try:
        _check_offsets(cache.offsets, meta)
        given = expected.tokenizer if expected is not None else None
        known = cache.tokenizer if given is None or isinstance(given, TokenizerSpec) else given
    except (DamagedArrayError, UserError) as error:
        raise DamagedCacheError(str(error)) from error
    largest = _largest(cache.tokens)
    if largest >= known.vocab_size:
        raise DamagedCacheError(f"tokens.bin holds token {largest}, and its tokenizer knows {known.vocab_size:,}")
    return cache


def folder_of(fingerprint: str, tokenizer: TokenizerSpec | Tokenizer, cache_dir: str | os.PathLike[str] | None) -> Path:
    """Where the cache of a source of this fingerprint lies, whether or not it exists yet."""
    parts = (FORMAT, fingerprint, tokenizer_key(tokenizer))
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    kind = tokenizer.short_name if isinstance(tokenizer, TokenizerSpec) else "tokens"
    base = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    return base / f"{kind}-{digest}"  # nothing of the text's place: `flashtrain cache` tells which text it is


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


def check_ids(tokens: np.ndarray, vocab_size: int | None, path: object) -> None:
    """Raise UserError where a token is none of the vocabulary's (None: nobody knows how many).

    Looking such a one up ends the process on a GPU. A long file was looked at in samples only when it was opened.
    """
    if vocab_size is not None and tokens.size and tokens.max() >= vocab_size:
        remedy = "it changed since the run began."
        if isinstance(path, Path):
            remedy = f"delete the folder {path.parent}, and it is made anew."
        raise UserError(f"{path} holds token {tokens.max()}, and its tokenizer knows {vocab_size:,}: {remedy}")


def _largest(tokens: np.ndarray) -> int:
    """The largest id; of a long file, in the blocks that its checksum looks at."""
    size = tokens.nbytes
    if size <= WHOLE_CHECKSUM_LIMIT:
        return int(tokens.max())
    count = BLOCK // tokens.itemsize
    begins = ((size - BLOCK) * number // (SAMPLED_BLOCKS - 1) // tokens.itemsize for number in range(SAMPLED_BLOCKS))
    return max(int(tokens[begin : begin + count].max()) for begin in begins)


def _check_offsets(offsets: np.ndarray, meta: CacheMeta) -> None:
    """Every document is at least its end of text, and together they are all tokens."""
    if len(offsets) != meta.documents + 1 or offsets[0] != 0 or offsets[-1] != meta.tokens:
        raise DamagedCacheError("meta.json does not fit documents.npy")
    if (offsets[1:] <= offsets[:-1]).any():
        raise DamagedCacheError("documents.npy is not in order")


def _check_noted(name: str, noted: object) -> None:
    """A file in meta.json: its name stays within the folder."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name or ":" in name:
        raise DamagedCacheError("meta.json names a file that is not in the folder")
    kinds = {key: type(value) for key, value in noted.items()} if isinstance(noted, dict) else {}
    if kinds != {"bytes": int, "checksum": str}:
        raise DamagedCacheError(f"meta.json does not say what {name} is")


def open_checked(folder: Path, expected: Expected, *, warn: bool = False) -> TokenCache | None:
    if not folder.exists():
        return None
    try:
        found = open_cache(folder, expected)
        with contextlib.suppress(OSError):  # a cache of somebody else's
            os.utime(folder / META)  # when it was last used
        return found
    except DamagedCacheError as damage:
        if warn:
            log.warning("the token cache %s is damaged (%s): building it again", folder, damage)
        return None
