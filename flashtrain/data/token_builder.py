"""Writing a token cache (token_cache: what is in one), or finding it: streamed, in little memory, all or nothing.

load_dataset and map of datasets 5.2 made 0.70M tokens a second of 20 MB where this makes 1.03M, and left an Arrow copy.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Protocol, runtime_checkable
from uuid import uuid4

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from flashtrain.data.sources import TextSource
from flashtrain.data.token_cache import (
    FORMAT,
    MARKS,
    CacheMeta,
    TokenCache,
    folder_of,
    open_cache,
    open_if_whole,
    tokenizer_key,
)
from flashtrain.data.tokenizers import Tokenizer, TokenizerSpec, as_document, make_tokenizer
from flashtrain.errors import UserError
from flashtrain.files.caches import only_writer
from flashtrain.files.disk import flush

log = logging.getLogger(__name__)

GROUP_CHARACTERS = 8_000_000
GROUP_DOCUMENTS = 4096
SECONDS_BETWEEN_LINES = 10.0
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Marked(NamedTuple):
    """Some documents as they are written: of each its tokens and marks (see token_cache); bytes of their texts."""

    tokens: Sequence[np.ndarray]
    marks: Sequence[np.ndarray]
    text_bytes: int


@runtime_checkable
class MarkedSource(Protocol):
    """A TextSource that makes its own tokens, each with a mark."""

    def encoded(self, tokenizer: Tokenizer) -> Iterator[Marked]:
        """Groups of documents, always in the same order. No group and no document is empty."""
        ...


def open_or_build(
    source: TextSource, tokenizer: TokenizerSpec | Tokenizer, cache_dir: str | os.PathLike[str] | None = None
) -> TokenCache:
    """The token cache of this source and tokenizer, built first where it is missing or damaged.

    Processes that ask for the same cache at one time build it once: one builds, the others wait and open it.
    cache_dir: where caches live, default_cache_dir() by default. Raises UserError: an empty corpus, a folder that
    cannot be written, a full disk, and whatever the source or the tokenizer object to.
    """
    folder = folder_of(source.fingerprint(), tokenizer, cache_dir)
    found = open_if_whole(folder)
    if found is not None:
        return found
    with only_writer(folder, "data.cache_dir"):
        found = open_if_whole(folder, warn=True)
        remove_leftovers(folder)
        if found is None:
            build(source, tokenizer, folder)
            found = open_cache(folder)
    return found


def build(source: TextSource, tokenizer: TokenizerSpec | Tokenizer, folder: Path) -> None:
    """Write the cache folder, replacing whatever is there. The caller holds the folder's lock.

    Everything is written to a folder beside it, flushed to disk, and renamed, so that a process killed at any moment
    leaves the old state, or the new. Raises UserError: an empty corpus, a full disk, a source that changes meanwhile.
    """
    fingerprint = source.fingerprint()
    part = folder.with_name(f"{folder.name}.building-{os.getpid()}-{uuid4().hex[:8]}")
    written = _Written()
    try:
        part.mkdir(parents=True)
        made = make_tokenizer(tokenizer, source) if isinstance(tokenizer, TokenizerSpec) else tokenizer
        made.save(part / "tokenizer")
        with _ProgressLine(f"tokenizing {source.describe()}", source.approximate_bytes()) as progress:
            if isinstance(source, MarkedSource):
                _write_marked(source.encoded(made), made, part, written, progress)
            else:
                _write_tokens(source.documents(), made, part, written, progress)
        if not written.documents:
            raise UserError(f"{source.describe()} holds no text: the corpus is empty.")
        if source.fingerprint() != fingerprint:
            raise UserError(f"{source.describe()} changed while it was read; start again once it stays as it is.")
        CacheMeta(
            format=FORMAT,
            source=source.describe(),
            source_fingerprint=fingerprint,
            tokenizer_key=tokenizer_key(tokenizer),
            tokenizer_fingerprint=made.fingerprint(),
            dtype=written.dtype,
            tokens=written.tokens,
            documents=written.documents,
            text_bytes=written.text_bytes,
            files={
                path.relative_to(part).as_posix(): {"bytes": path.stat().st_size}
                for path in sorted(path for path in part.rglob("*") if path.is_file())
            },
        ).write(part)
        for path in (*part.rglob("*"), part):  # before the rename: a power cut must not leave empty files
            flush(path)
        if folder.exists():
            # A folder cannot be renamed onto one that is not empty; moved aside first, it is never seen half deleted.
            folder.replace(part.with_name(f"{part.name}-replaced"))
        part.replace(folder)
        flush(folder.parent)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise _disk_full(part, source, written) from error
    finally:
        remove_leftovers(folder)
    counts = f"{written.tokens:,}", f"{written.documents:,}"
    log.info("%s tokens of %s documents written to %s (%s)", *counts, folder, written.rate)


def remove_leftovers(folder: Path) -> None:
    """Remove what builds of this folder left behind when they were killed. The caller holds the folder's lock."""
    for path in folder.parent.glob(f"{folder.name}.building-*"):
        shutil.rmtree(path, ignore_errors=True)


class _Written:
    """Counts of what has been written so far."""

    def __init__(self) -> None:
        self.dtype = "uint16"
        self.tokens = 0
        self.documents = 0
        self.text_bytes = 0
        self.begun = time.monotonic()

    @property
    def rate(self) -> str:
        """Tokens a second so far, in words."""
        return f"{self.tokens / max(1e-9, time.monotonic() - self.begun) / 1e6:,.2f}M tokens/s"


def _write_tokens(
    documents: Iterable[str], tokenizer: Tokenizer, part: Path, written: _Written, progress: _ProgressLine
) -> None:
    written.dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    written.begun = time.monotonic()
    offsets = array("q", [0])
    groups = _groups(documents)
    group = next(groups, None)
    with ThreadPoolExecutor(1, "flashtrain-reads") as reader, (part / "tokens.bin").open("wb") as file:
        while group is not None:
            # The tokenizers library lets other threads go on: the next group is read while it encodes on all cores.
            coming = reader.submit(next, groups, None)
            arrays = []
            for ids in tokenizer.encode_batch(group):
                arrays.append(as_document(tokenizer, ids).astype(written.dtype))
                written.tokens += len(arrays[-1])
                offsets.append(written.tokens)
            written.text_bytes += sum(len(text.encode()) for text in group)
            _write(file, np.concatenate(arrays))
            written.documents += len(group)
            progress.update(written)
            group = coming.result()
    np.save(part / "documents.npy", np.frombuffer(offsets, dtype=np.int64), allow_pickle=False)


def _write_marked(
    groups: Iterable[Marked], tokenizer: Tokenizer, part: Path, written: _Written, progress: _ProgressLine
) -> None:
    written.dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    offsets = array("q", [0])
    with (part / "tokens.bin").open("wb") as file, (part / MARKS).open("wb") as marks:
        for group in groups:
            for ids in group.tokens:
                written.tokens += len(ids)
                offsets.append(written.tokens)
            written.text_bytes += group.text_bytes
            _write(file, np.concatenate(group.tokens).astype(written.dtype))
            _write(marks, np.concatenate(group.marks))
            written.documents += len(group.tokens)
            progress.update(written)
    np.save(part / "documents.npy", np.frombuffer(offsets, dtype=np.int64), allow_pickle=False)


def _write(file: IO[bytes], tokens: np.ndarray) -> None:
    file.write(tokens.tobytes())


def _groups(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents with text, in groups that keep all cores busy and memory small."""
    group: list[str] = []
    characters = 0
    for document in documents:
        if not document:
            continue
        group.append(document)
        characters += len(document)
        if characters >= GROUP_CHARACTERS or len(group) >= GROUP_DOCUMENTS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _disk_full(part: Path, source: TextSource, written: _Written) -> UserError:
    free = shutil.disk_usage(part.parent).free
    size = written.tokens * np.dtype(written.dtype).itemsize
    expected = source.approximate_bytes()
    if expected and written.text_bytes:
        need = f"about {amount(size * max(1.0, expected / written.text_bytes))} are needed"
    else:
        need = f"more than {amount(size)} are needed"
    return UserError(
        f"the disk is full: {part.parent} has {amount(free)} free while a token file is half written, and {need} "
        "in all. Free some, choose another folder with cache_dir, or set FLASHTRAIN_CACHE."
    )


def amount(size: float) -> str:
    """Bytes in words."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


class _ProgressLine:
    """A bar on a terminal; elsewhere a logged line every SECONDS_BETWEEN_LINES."""

    def __init__(self, what: str, total_bytes: int | None) -> None:
        self._what = what
        self._total = total_bytes
        self._last_line = time.monotonic()
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[done]}"),
            )
            self._bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)

    def __enter__(self) -> _ProgressLine:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total, done="")
        else:
            log.info("%s", self._what)
        return self

    def update(self, written: _Written) -> None:
        done = f"{amount(written.text_bytes)}, {written.tokens / 1e6:,.1f}M tokens"
        if self._bar is not None:
            self._bar.update(self._task, completed=written.text_bytes, done=f"{done}, {written.rate}")
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            share = f" ({min(100, 100 * written.text_bytes // self._total)}%)" if self._total else ""
            log.info("%s: %s%s, %s", self._what, done, share, written.rate)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
