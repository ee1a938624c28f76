"""The token cache: a corpus as one array of token ids on disk, made once and
read through a memory map.

A cache is a folder that appears whole or not at all:

    tokens.bin     the ids of all documents in order, each document ended by
                   end_of_text; uint16 or uint32
    documents.npy  int64, (documents + 1,): document d is tokens[documents[d]:documents[d + 1]]
    marks.bin      uint8, one per token, only of sources that mark their tokens
                   (chat: LABELLED, GOES_ON)
    tokenizer/     the tokenizer that made the tokens (tokenizers.load_tokenizer reads it)
    meta.json      source, counts, and a checksum of each block of 16 MiB of the files above

The folder's name holds a hash of what decides the content, so that a changed source or
tokenizer gets another folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from flashtrain.data.packing import Spans, Split, split_documents
from flashtrain.data.sources import TextSource, TokenSource, held_out
from flashtrain.data.special_tokens import counted, tokenizer_for
from flashtrain.data.tokenizers import (
    KINDS,
    Tokenizer,
    TokenizerSpec,
    as_document,
    load_tokenizer,
    make_tokenizer,
)
from flashtrain.errors import UserError, one_of
from flashtrain.files.caches import default_cache_dir, only_writer
from flashtrain.files.disk import flush
from flashtrain.files.json_files import read_json

log = logging.getLogger(__name__)

# Why not load_dataset and map of datasets 5.2: 0.70M tokens/s on 20 MB of text, where this has
# 1.03M, and another copy.
FORMAT = 1
TOKENS, DOCUMENTS, MARKS, META = "tokens.bin", "documents.npy", "marks.bin", "meta.json"
CHECKSUMS = "crc32"  # key of meta.json: name of a file -> the checksum of each of its blocks
BLOCK_BYTES = 2**24
DTYPES = "uint16", "uint32"
LABELLED = 1  # mark of a token that is a label
# Mark of a document's first token: the document continues the conversation of the one before.
GOES_ON = 2
GROUP_CHARACTERS = 8_000_000
GROUP_DOCUMENTS = 4096
SECONDS_BETWEEN_LINES = 10.0

Item = TypeVar("Item")


class TokenFile(NamedTuple):
    """A file of tokens: its path, the byte at which the first token begins, the number of tokens
    and their dtype."""

    path: Path
    dtype: str
    begin: int  # byte of the first token
    tokens: int
    has_checksums: bool = False  # of its blocks, in the meta.json beside it

    def mapped(self) -> np.ndarray:
        """Return the tokens as a (tokens,) array that is read through a memory map."""
        # A plain array: slices of numpy's memmap class cost ten times as much to make.
        return np.asarray(
            np.memmap(self.path, self.dtype, "r", offset=self.begin, shape=(self.tokens,))
        )


class _Checked:
    """The mapped tokens of a file; each block of the file is compared with its checksum when tokens
    in it are first read."""

    def __init__(self, file: TokenFile) -> None:
        self.path, self.tokens = file.path, file.mapped()
        sums = []
        if file.has_checksums:
            sums = read_json(file.path.with_name(META))[CHECKSUMS][file.path.name]
        self.unread = dict(enumerate(sums))  # number of a block -> its checksum

    def __getitem__(self, place: slice) -> np.ndarray:
        begin, end, _ = place.indices(len(self.tokens))
        size = BLOCK_BYTES // self.tokens.itemsize
        for block in range(begin // size, -(-end // size)) if self.unread else ():
            known = self.unread.get(block)
            if known is not None and known != zlib.crc32(
                self.tokens[block * size : (block + 1) * size].data
            ):
                where = self.path.parent
                raise UserError(
                    f"{self.path} has changed since it was written. "
                    f"Remove {where}; the next run makes it anew."
                )
            self.unread.pop(block, None)
        return self.tokens[place]


class MappedTokens:
    """Several files of tokens as one array, which is read in slices.

    Files are mapped at the first read, so that the object is cheap to send to worker processes.
    """

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self.files = files
        self._begins = np.cumsum([0, *(file.tokens for file in files)])
        self._arrays: list[_Checked] = []

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, place: slice) -> np.ndarray:
        if not self._arrays:
            self._arrays = [_Checked(file) for file in self.files]
        if len(self._arrays) == 1:
            return self._arrays[0][place]
        begin, end, _ = place.indices(len(self))
        first, last = np.searchsorted(self._begins, (begin, end), side="right") - 1
        parts = []
        for number in range(first, min(last + 1, len(self.files))):
            start = int(self._begins[number])
            parts.append(self._arrays[number][max(0, begin - start) : end - start])
        return np.concatenate(parts)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": []}


@dataclass(frozen=True)
class OpenTokens:
    """The tokens of a cache, or of a user's token files (token_files), opened for reading."""

    folder: Path  # of the cache, or the path of the token files
    files: tuple[TokenFile, ...]  # where the tokens are, in order
    # (documents + 1,) int64, where each document begins and ends among all tokens.
    offsets: np.ndarray
    # None for a cache, which has its tokenizer in the folder.
    own_tokenizer: Tokenizer | None = None
    # (documents,) bool: is it named for validation; None: no document is.
    held_out: np.ndarray | None = None
    has_documents: bool = True  # whether it is known where documents end
    # What identifies the tokens to train on: the name of the cache, or the files' checksums.
    key: str = ""

    @cached_property
    def tokens(self) -> MappedTokens:
        """All tokens of all files, as one array."""
        return MappedTokens(self.files)

    @cached_property
    def marks(self) -> MappedTokens:
        """The marks of all tokens, uint8 with the bits LABELLED and GOES_ON; only for a source that
        marks its tokens."""
        files = (
            file._replace(path=file.path.with_name(MARKS), dtype="uint8") for file in self.files
        )
        return MappedTokens(list(files))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        return self.own_tokenizer or load_tokenizer(self.folder / "tokenizer")

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.offsets) - 1

    def split(self, *, fraction: float, context: int) -> Split:
        """Hold out the documents from files named for validation, or else as
        packing.split_documents does."""
        if self.held_out is None:
            return split_documents(self.offsets, fraction=fraction, context=context)
        begins, ends = self.offsets[:-1], self.offsets[1:]
        training, validation = (
            Spans(begins[side], ends[side]) for side in (~self.held_out, self.held_out)
        )
        return Split(training, validation if fraction else None)


class Encoded(NamedTuple):
    """A group of encoded documents.

    A source that makes its own tokens (chat) has a method `encoded(tokenizer)`,
    which yields such groups.
    """

    tokens: Sequence[np.ndarray]  # of each document
    marks: Sequence[np.ndarray]  # of each document; empty if the source has none
    text_bytes: int  # of the documents' texts


def open_split(
    source: TextSource | TokenSource,
    tokenizer: TokenizerSpec | Tokenizer,
    cache_dir: str | os.PathLike[str] | None = None,
    validation: TextSource | TokenSource | None = None,
) -> OpenTokens:
    """Open the tokens of a source, followed by those of its held-out documents, if any.

    Args:
        source: Source of the training documents.
        tokenizer: As in TextDataModule.
        cache_dir: Folder of caches (None: default_cache_dir()).
        validation: Source of the held-out documents (None: the source's files that are
            named for validation).

    Raises:
        UserError: As in open_or_build.
    """
    own = open_or_build(source, tokenizer, cache_dir)
    other = held_out(source) if validation is None else validation
    if other is None:
        return own
    # On the training text alone.
    trained = isinstance(tokenizer, TokenizerSpec) and tokenizer.kind == "bpe"
    of_other = open_or_build(other, own.tokenizer if trained else tokenizer, cache_dir)
    offsets = np.concatenate([own.offsets, own.offsets[-1] + of_other.offsets[1:]])
    mask = np.arange(len(offsets) - 1) >= own.documents
    return replace(own, files=(*own.files, *of_other.files), offsets=offsets, held_out=mask)


def open_or_build(
    source: TextSource | TokenSource,
    tokenizer: TokenizerSpec | Tokenizer,
    cache_dir: str | os.PathLike[str] | None = None,
) -> OpenTokens:
    """Open a source's own tokens, or the token cache of its text and a tokenizer, which is
    built if it is missing.

    If several processes need the same cache, one builds it, and the others wait and open it.

    Args:
        source: Source of the documents.
        tokenizer: The tokenizer, or which one to make.
        cache_dir: Folder of caches (None: default_cache_dir()).

    Raises:
        UserError: The corpus is empty, the folder cannot be written, the disk is full, or the
            source or tokenizer cannot be read.
    """
    if isinstance(source, TokenSource):
        return source.open_tokens(tokenizer, cache_dir)
    read = " with special tokens" if getattr(source, "special_tokens", False) else ""
    folder = folder_of(source.fingerprint() + read, tokenizer, cache_dir)
    if not folder.is_dir():
        with only_writer(folder, "data.cache_dir"):
            if not folder.is_dir():  # another process may have built it
                _build(source, tokenizer, folder)
    return _open(folder)


def cache_root(cache_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder of caches: `cache_dir`, or default_cache_dir() if it is None."""
    return default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()


def folder_of(
    fingerprint: str, tokenizer: TokenizerSpec | Tokenizer, cache_dir: str | os.PathLike[str] | None
) -> Path:
    """Return the cache folder for a source's fingerprint and a tokenizer. The
    folder may not exist yet."""
    # The key is what decides the tokens, without training or downloading the tokenizer.
    if isinstance(tokenizer, TokenizerSpec):
        kind, key = tokenizer.kind if tokenizer.kind in KINDS else "huggingface", tokenizer.key()
    else:
        kind, key = "tokens", tokenizer.fingerprint()
    digest = hashlib.sha256(repr((FORMAT, fingerprint, key)).encode()).hexdigest()[:12]
    return cache_root(cache_dir) / f"{kind}-{digest}"  # the text's own path is only in meta.json


def _open(folder: Path) -> OpenTokens:
    meta = read_json(folder / META)
    # numpy takes tokens of "O" for pointers.
    one_of(f"dtype in {folder / META}:", str(meta["dtype"]), DTYPES)
    if CHECKSUMS not in meta:
        log.info(
            "%s has no checksums, since an older version made it: damage in it is not noticed",
            folder,
        )
    tokens = TokenFile(folder / TOKENS, meta["dtype"], 0, meta["tokens"], CHECKSUMS in meta)
    places = folder / DOCUMENTS
    _Checked(TokenFile(places, "uint8", 0, places.stat().st_size, CHECKSUMS in meta))[:]
    offsets = np.load(places, mmap_mode="r", allow_pickle=False)
    return OpenTokens(folder, (tokens,), offsets, key=folder.name)


def checksums(path: Path) -> list[int]:
    """Return the CRC-32 of each block of a file, BLOCK_BYTES long."""
    with path.open("rb") as file:
        return [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK_BYTES), b"")]


def _build(source: TextSource, tokenizer: TokenizerSpec | Tokenizer, folder: Path) -> None:
    """Encode the source and write the cache folder; the caller has locked it."""
    # Everything is written to a folder next to it, flushed to disk, and renamed: a process that is
    # killed at any moment leaves a whole cache or none.
    fingerprint = source.fingerprint()
    part = folder.with_name(f"{folder.name}.building")
    shutil.rmtree(part, ignore_errors=True)  # left by a build that was killed
    try:
        part.mkdir(parents=True)
        made = make_tokenizer(tokenizer, source.documents)
        made.save(part / "tokenizer")
        log.info("tokenizing %s", source.describe())
        encoded = getattr(source, "encoded", None)
        groups = _encoded(source, tokenizer_for(source, made)) if encoded is None else encoded(made)
        counts = _write(groups, part, DTYPES[made.vocab_size > 2**16], source.approximate_bytes())
        if not counts["documents"]:
            raise UserError(f"{source.describe()} contains no text: the corpus is empty.")
        if source.fingerprint() != fingerprint:
            raise UserError(
                f"{source.describe()} changed while it was read. "
                "Start again when it no longer changes."
            )
        sums = {
            name: checksums(part / name)
            for name in (TOKENS, DOCUMENTS, MARKS)
            if (part / name).exists()
        }
        meta = json.dumps({"source": source.describe(), **counts, CHECKSUMS: sums})
        (part / META).write_text(meta, encoding="utf-8")
        # Before the rename: a power cut must not leave empty files.
        for path in (*part.rglob("*"), part):
            flush(path)
        part.replace(folder)
        flush(folder.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _encoded(source: TextSource, tokenizer: Tokenizer) -> Iterator[Encoded]:
    groups = grouped(counted(filter(None, source.documents()), tokenizer), len)
    with ThreadPoolExecutor(1, "flashtrain-reads") as reader:
        # The tokenizers library releases the GIL: the next group is read while this one is
        # encoded on all cores.
        coming = reader.submit(next, groups, None)
        while (group := coming.result()) is not None:
            coming = reader.submit(next, groups, None)
            ids = [as_document(tokenizer, ids) for ids in tokenizer.encode_batch(group)]
            yield Encoded(ids, (), sum(len(text.encode()) for text in group))


def grouped(documents: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield documents in groups that are large enough for all cores and small enough for memory.

    Args:
        size: Returns the number of characters of a document.
    """
    group: list[Item] = []
    characters = 0
    for document in documents:
        group.append(document)
        characters += size(document)
        if characters >= GROUP_CHARACTERS or len(group) >= GROUP_DOCUMENTS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _write(
    groups: Iterable[Encoded], part: Path, dtype: str, expected_bytes: int | None
) -> dict[str, Any]:
    offsets, read_bytes = array("q", [0]), 0
    begun = logged = time.monotonic()
    with (part / TOKENS).open("wb") as tokens, (part / MARKS).open("wb") as marks:
        for group in groups:
            for ids in group.tokens:
                offsets.append(offsets[-1] + len(ids))
            tokens.write(np.concatenate(group.tokens).astype(dtype).tobytes())
            marks.write(b"".join(of_document.tobytes() for of_document in group.marks))
            read_bytes += group.text_bytes
            now = time.monotonic()
            if now - logged >= SECONDS_BETWEEN_LINES:
                logged = now
                share = (
                    f" ({min(100, 100 * read_bytes // expected_bytes)}%)" if expected_bytes else ""
                )
                rate = offsets[-1] / (now - begun) / 1e6
                log.info("%.1f MB of text%s, %.2fM tokens/s", read_bytes / 1e6, share, rate)
    if not (part / MARKS).stat().st_size:
        (part / MARKS).unlink()
    np.save(part / DOCUMENTS, np.frombuffer(offsets, dtype=np.int64), allow_pickle=False)
    rate, count = offsets[-1] / max(1e-9, time.monotonic() - begun) / 1e6, len(offsets) - 1
    log.info(
        "%s tokens of %s, %.2fM tokens/s",
        f"{offsets[-1]:,}",
        f"{count:,} document{'s' * (count != 1)}",
        rate,
    )
    return {"dtype": dtype, "tokens": offsets[-1], "documents": count}
