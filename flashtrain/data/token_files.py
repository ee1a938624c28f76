"""Files of tokens that somebody else made: .npy, and .bin as nanoGPT and llm.c write them. Read through a memory map.

Source of llm.c's header: github.com/karpathy/llm.c, dev/data/data_common.py.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flashtrain.data.packing import Spans, Split, split_documents
from flashtrain.data.sources import TextSource, held_out
from flashtrain.data.split_names import by_split
from flashtrain.data.token_builder import open_or_build
from flashtrain.data.token_cache import TokenCache
from flashtrain.data.token_ids import TokenIds
from flashtrain.data.tokenizers import Tokenizer, TokenizerSpec, make_tokenizer
from flashtrain.errors import UserError, first_line
from flashtrain.files.caches import default_cache_dir
from flashtrain.files.disk import replacing
from flashtrain.files.found_files import find_files

log = logging.getLogger(__name__)

FORMATS = (".npy", ".bin")
NPY_DTYPES = ("uint16", "uint32", "int32", "int64")
HEADER_BYTES = 1024  # of llm.c: 256 int32, of which the first three are magic, version and count
HEADERS = {20240520: "uint16", 20240801: "uint32"}  # magic of GPT-2's tokens, of Llama 3's
AT_ONCE = 2**24  # tokens that are looked at
REMEMBERED_FROM = 2**26  # bytes of a file whose documents are noted in the cache: looking at them takes a while


class TokenFile(NamedTuple):
    """One file: its tokens begin at this byte, and are so many of this type."""

    path: Path
    dtype: str
    begin: int
    tokens: int

    def mapped(self) -> np.ndarray:
        # The plain array: slices of numpy's memmap class cost ten times as much to make.
        return np.asarray(np.memmap(self.path, self.dtype, "r", offset=self.begin, shape=(self.tokens,)))


@dataclass(frozen=True)
class JoinedFiles:
    """Several files as one array of tokens, mapped where it is first read."""

    files: tuple[TokenFile, ...]

    def mapped(self) -> MappedFiles:
        return MappedFiles(self.files)

    def __str__(self) -> str:
        return str(self.files[0].path.parent if len(self.files) > 1 else self.files[0].path)


class MappedFiles:
    """Slices of it are copied, since they may span files."""

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self._arrays = [file.mapped() for file in files]
        self._begins = np.concatenate([[0], np.cumsum([file.tokens for file in files])])

    def __getitem__(self, place: slice) -> np.ndarray:
        begin, end = place.start, min(place.stop, int(self._begins[-1]))
        parts = []
        number = int(np.searchsorted(self._begins, begin, side="right")) - 1
        while begin < end:
            first, past = int(self._begins[number]), int(self._begins[number + 1])
            parts.append(self._arrays[number][begin - first : min(end, past) - first])
            begin, number = past, number + 1
        return np.concatenate(parts) if parts else np.empty(0, np.uint16)


class TokenFiles:
    """A file of tokens, or every .npy and .bin below a folder in the order of their paths.

    dtype: of .bin files without llm.c's header. end_of_text: the id that separates documents (None: the tokenizer's,
    or none where there is no tokenizer; each file is then one document). In a folder, files named for validation are
    held out, and those named for a test are not read (split_names). validation: a file or folder that is held out.
    Raises UserError: a missing path, a file of another form than its name says, a token beyond the vocabulary.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: str | None = None,
        end_of_text: int | None = None,
        validation: str | os.PathLike[str] | None = None,
    ) -> None:
        self.path = Path(path).expanduser()
        self.dtype = dtype
        self.end_of_text = end_of_text
        self.validation = None if validation is None else TokenFiles(validation, dtype=dtype)

    def describe(self) -> str:
        return f"tokens in {self.path}"

    def files(self) -> dict[str, list[TokenFile]]:
        """The files by split (train, validation), their headers checked. Raises UserError."""
        found = self._paths()
        if self.validation is not None:
            others = self.validation._paths()
            found = {**found, "validation": others.get("validation", others["train"])}
        if "test" in found:
            log.info("left out: %s", ", ".join(path.name for path in found.pop("test")))
        return {split: [token_file(path, self.dtype) for path in paths] for split, paths in found.items()}

    def _paths(self) -> dict[str, list[Path]]:
        found = {name: path for name, path in find_files(self.path).items() if path.suffix in FORMATS}
        if not found:
            raise UserError(f"no file of tokens at data.path={self.path}: {' or '.join(FORMATS)} are read.")
        return by_split(found, any_word=True)

    def open_tokens(
        self, tokenizer: TokenizerSpec | Tokenizer, cache_dir: str | os.PathLike[str] | None
    ) -> OpenTokenFiles:
        """The files, mapped, and looked at once: every token is one of the vocabulary's. Raises UserError."""
        splits = self.files()
        files = sorted((file for paths in splits.values() for file in paths), key=lambda file: file.path)
        known = self._tokenizer(tokenizer)
        end = known.end_of_text if self.end_of_text is None else self.end_of_text
        if end >= known.vocab_size:
            raise UserError(f"data.end_of_text={end} is none of the {known.vocab_size:,} tokens of the vocabulary.")
        cache = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
        seen = [_looked_at(file, end, cache) for file in files]
        for file, (least, most, _) in zip(files, seen, strict=True):
            if least < 0 or most >= known.vocab_size:
                raise UserError(
                    f"{file.path} holds token {least if least < 0 else most}, and the vocabulary has "
                    f"{known.vocab_size:,}: name its data.tokenizer, or data.vocab_size where it has none."
                )
        held_out = splits.get("validation", [])
        if held_out:
            log.info("held out: %s", ", ".join(file.path.name for file in held_out))
        ends = [ends for *_, ends in seen]
        return OpenTokenFiles(self.path, tuple(files), ends, known, [file in held_out for file in files], end >= 0)

    def _tokenizer(self, tokenizer: TokenizerSpec | Tokenizer) -> Tokenizer:
        if not isinstance(tokenizer, TokenizerSpec):
            return tokenizer
        if tokenizer.kind == "none":
            return TokenIds(tokenizer.vocab_size, self.end_of_text)
        if tokenizer.kind == "bpe":
            raise UserError(
                "data.tokenizer=bpe is trained on text, and data=tokens has none: name the one they are of."
            )
        return make_tokenizer(tokenizer, self)  # type: ignore[arg-type]  # which only "bpe" reads


class Counted(NamedTuple):
    """As of token_cache.CacheMeta. dtype: of the first file."""

    dtype: str
    documents: int


@dataclass(frozen=True)
class OpenTokenFiles:
    """What a data module needs of a token cache (token_cache.TokenCache), of files that lie where they are.

    ends: of each file, where its documents end. held_out: of each file, whether it validates. has_documents: whether an
    end of text is known.
    """

    folder: Path
    files: tuple[TokenFile, ...]
    ends: list[np.ndarray]
    tokenizer: Tokenizer
    held_out: list[bool]
    has_documents: bool

    @property
    def tokens_path(self) -> JoinedFiles:
        return JoinedFiles(self.files)

    @cached_property
    def tokens(self) -> MappedFiles:
        return self.tokens_path.mapped()

    @property
    def meta(self) -> Counted:
        return Counted(self.files[0].dtype, len(self.offsets) - 1)

    @cached_property
    def offsets(self) -> np.ndarray:
        """(documents + 1,) int64: where each document begins and ends among all tokens."""
        begins = np.cumsum([0, *(file.tokens for file in self.files)])
        return np.concatenate([[0], *(begin + ends for begin, ends in zip(begins, self.ends, strict=False))])

    def split(self, *, fraction: float, context: int) -> Split:
        """As split_documents, but that files that are for it are held out, if there are some beside others."""
        if not any(self.held_out):
            return split_documents(self.offsets, fraction=fraction, context=context)
        mask = np.repeat(self.held_out, [len(ends) for ends in self.ends])
        begins, ends = self.offsets[:-1], self.offsets[1:]
        sides = [Spans(begins[side], ends[side]) for side in (~mask, mask)]
        if fraction in (0, 1):
            return Split(sides[0], sides[1] if fraction else None)
        for spans, name in zip(sides, ("to train on", "to validate on"), strict=True):
            if spans.tokens < context + 1:
                raise UserError(
                    f"the files of {self.folder} have {spans.tokens:,} tokens {name}, fewer than the {context + 1:,} "
                    f"of one sample with context={context}."
                )
        return Split(*sides)


def open_split(
    source: TextSource,
    tokenizer: TokenizerSpec | Tokenizer,
    cache_dir: str | os.PathLike[str] | None = None,
    validation: TextSource | None = None,
) -> TokenCache | OpenTokenFiles:
    """The token cache of a source, joined to that of what validates: `validation`, or files that are named for it."""
    cache = open_or_build(source, tokenizer, cache_dir)
    other = held_out(source) if validation is None else validation
    if other is None:
        return cache
    trained = isinstance(tokenizer, TokenizerSpec) and tokenizer.kind == "bpe"  # on the text to train on
    caches = [cache, open_or_build(other, cache.tokenizer if trained else tokenizer, cache_dir)]
    files = tuple(TokenFile(one.tokens_path, one.meta.dtype, 0, one.meta.tokens) for one in caches)
    ends = [np.asarray(one.offsets[1:]) for one in caches]
    return OpenTokenFiles(cache.folder, files, ends, cache.tokenizer, [False, True], has_documents=True)


def token_file(path: Path, dtype: str | None) -> TokenFile:
    """Where a file's tokens lie, from its header, its size and data.dtype. Raises UserError."""
    found = _npy_file(path) if path.suffix == ".npy" else _bin_file(path, dtype)
    if not found.tokens:
        raise UserError(f"{path} holds no token.")
    return found


def _npy_file(path: Path) -> TokenFile:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:  # which do not name the file
        raise UserError(f"{path} holds no tokens: {first_line(error)}.") from error
    dtype = next((name for name in NPY_DTYPES if array.dtype == np.dtype(name)), None)
    if dtype is None or array.ndim != 1:
        raise UserError(
            f"{path} holds {array.dtype} of shape {array.shape}: expected one dimension of {', '.join(NPY_DTYPES)}."
        )
    return TokenFile(path, dtype, array.offset, len(array))


def _bin_file(path: Path, dtype: str | None) -> TokenFile:
    size = path.stat().st_size
    with path.open("rb") as file:
        header = np.frombuffer(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"), "<i4")
    magic, count = int(header[0]), int(header[2])
    by_header = HEADERS.get(magic)
    if by_header is not None and dtype in (None, by_header):
        if size != HEADER_BYTES + count * np.dtype(by_header).itemsize:
            raise UserError(f"{path} has llm.c's header of {count:,} tokens, and is not as long as they are.")
        return TokenFile(path, by_header, HEADER_BYTES, count)
    if dtype is None:
        raise UserError(
            f"{path} does not say what its tokens are: say data.dtype=uint16 (as GPT-2's, of vocabularies up "
            "to 65,536) or uint32."
        )
    count, rest = divmod(size, np.dtype(dtype).itemsize)
    if rest:
        raise UserError(f"{path} has {size:,} bytes, which are no whole number of data.dtype={dtype}.")
    return TokenFile(path, dtype, 0, count)


def _looked_at(file: TokenFile, end_of_text: int, cache: Path) -> tuple[int, int, np.ndarray]:
    """The least and the largest token, and where documents end: after each end of text, and where the file does."""
    status = file.path.stat()
    state = (str(file.path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, *file[1:], end_of_text)
    noted = cache / "token-files" / f"{hashlib.sha256(repr(state).encode()).hexdigest()[:24]}.npy"
    large = status.st_size >= REMEMBERED_FROM
    if large:
        try:
            found = np.load(noted, mmap_mode="r", allow_pickle=False)
            return int(found[0]), int(found[1]), found[2:]
        except FileNotFoundError:
            log.info("looking at the %s tokens of %s once", f"{file.tokens:,}", file.path)
    tokens = file.mapped()
    pieces = [tokens[begin : begin + AT_ONCE] for begin in range(0, file.tokens, AT_ONCE)]
    least, most = min(int(piece.min()) for piece in pieces), max(int(piece.max()) for piece in pieces)
    found = np.array([least, most, *_ends(pieces, end_of_text, file.tokens)], dtype=np.int64)
    if large:
        _note(noted, found)
    return least, most, found[2:]


def _ends(pieces: Iterable[np.ndarray], end_of_text: int, count: int) -> Iterator[int]:
    begin = last = 0
    for piece in pieces:
        for place in np.flatnonzero(piece == end_of_text).tolist() if end_of_text >= 0 else ():
            last = begin + place + 1
            yield last
        begin += len(piece)
    if last < count:
        yield count


def _note(path: Path, values: np.ndarray) -> None:
    try:
        with replacing(path) as part, part.open("wb") as file:
            np.save(file, values, allow_pickle=False)
    except OSError as error:
        log.debug("the documents of a token file are not noted: %s", error)
