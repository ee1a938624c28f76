"""Read token files of other programs through a memory map: .npy, and .bin as
nanoGPT and llm.c write them.

Source of llm.c's header: github.com/karpathy/llm.c, dev/data/data_common.py.
"""

from __future__ import annotations

import hashlib
import logging
import os
import zlib
from dataclasses import InitVar, dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from flashtrain.data.split_names import SplitFiles
from flashtrain.data.token_cache import OpenTokens, TokenFile, cache_root
from flashtrain.data.token_ids import TokenIds
from flashtrain.data.tokenizers import NONE, Tokenizer, TokenizerSpec, make_tokenizer
from flashtrain.errors import UserError, first_line
from flashtrain.files.disk import replacing

log = logging.getLogger(__name__)

FORMATS = (".npy", ".bin")
NPY_DTYPES = ("uint16", "uint32", "int32", "int64")
HEADER_BYTES = 1024  # of llm.c: 256 int32, of which the first three are magic, version and count
HEADERS = {20240520: "uint16", 20240801: "uint32"}  # by the magic number: GPT-2's tokens, Llama 3's
TOKENS_CHUNK = 2**24  # tokens that are checked at once


@dataclass
class TokenFiles(SplitFiles):
    """A TokenSource: a file of tokens, or all .npy and .bin files below a folder, in
    the order of their paths.

    In a folder, files named for validation are held out, and files named for a test are not read
    (split_names). Raises UserError if the path does not exist, a file is malformed, or a token is
    not in the vocabulary.
    """

    source: InitVar[str | os.PathLike[str]]  # the file or folder
    dtype: str | None = None  # of .bin files without llm.c's header, uint16 or uint32
    # Id that ends documents; None: the tokenizer's, and without one the end of a file.
    end_of_text: int | None = None

    expected, any_word = " or ".join(FORMATS), True

    def __post_init__(self, source: str | os.PathLike[str]) -> None:
        self.path = Path(source).expanduser()

    def describe(self) -> str:
        return f"tokens in {self.path}"

    def chosen(self, found: dict[PurePath, Any]) -> dict[PurePath, Any]:
        return {name: file for name, file in found.items() if name.suffix in FORMATS}

    def open_tokens(
        self, tokenizer: TokenizerSpec | Tokenizer, cache_dir: str | os.PathLike[str] | None
    ) -> OpenTokens:
        """Open the files, and check once that every token is in the vocabulary. Raises
        UserError as the class does."""
        if isinstance(tokenizer, TokenizerSpec) and tokenizer.kind == NONE:
            tokenizer = TokenIds(tokenizer.vocab_size, self.end_of_text)
        known = make_tokenizer(tokenizer)
        end = known.end_of_text if self.end_of_text is None else self.end_of_text
        if end >= known.vocab_size:
            raise UserError(
                f"data.end_of_text={end} must be below the vocabulary's size, {known.vocab_size:,}."
            )
        cache = cache_root(cache_dir)
        files = tuple(
            _npy_file(path) if path.suffix == ".npy" else _bin_file(path, self.dtype)
            for path in self.files()
        )
        begin, offsets, sums = 0, [np.zeros(1, np.int64)], []
        for file in files:
            if not file.tokens:
                raise UserError(f"{file.path} contains no tokens. Remove the file.")
            low, high, checksum, *ends = _checked(file, end, cache)
            sums.append(f"{checksum:08x}")
            if low < 0 or high >= known.vocab_size:
                raise UserError(
                    f"{file.path} holds token {low if low < 0 else high}, expected 0 to "
                    f"{known.vocab_size - 1:,}. Set data.tokenizer to the tokenizer that made "
                    "it, or data.vocab_size to more than its largest token."
                )
            offsets.append(begin + np.array(ends))
            begin += file.tokens
        return OpenTokens(
            self.path, files, np.concatenate(offsets), known, None, end >= 0, "-".join(sums)
        )


def _npy_file(path: Path) -> TokenFile:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:  # numpy's errors do not name the file
        raise UserError(
            f"{path} cannot be read as .npy, an array of tokens: {first_line(error)}."
        ) from error
    dtype = next((name for name in NPY_DTYPES if array.dtype == np.dtype(name)), None)
    if dtype is None or array.ndim != 1:
        raise UserError(
            f"{path} holds {array.dtype} of shape {array.shape}, "
            f"expected one dimension of {', '.join(NPY_DTYPES)}."
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
            raise UserError(
                f"{path} is cut short or damaged: its llm.c header states {count:,} tokens, and "
                "the file's size is another. Copy or make the file again."
            )
        return TokenFile(path, by_header, HEADER_BYTES, count)
    if dtype is None:
        raise UserError(
            f"{path} does not state the type of its tokens. Set data.dtype=uint16 (vocabularies of "
            "up to 65,536 tokens, such as GPT-2's) or uint32."
        )
    count, rest = divmod(size, np.dtype(dtype).itemsize)
    if rest:
        raise UserError(
            f"{path} has {size:,} bytes, which is not a whole number of tokens of "
            f"data.dtype={dtype}. Set data.dtype to the type that the file was written with."
        )
    return TokenFile(path, dtype, 0, count)


def _checked(file: TokenFile, end_of_text: int, cache: Path) -> np.ndarray:
    """Return one int64 array: the smallest token, the largest token, a checksum, then the end of
    each document, the last of which is the file's end."""
    status = file.path.stat()
    times = status.st_mtime_ns, status.st_ctime_ns
    state = (
        "with checksum",
        str(file.path.resolve()),
        status.st_size,
        *times,
        *file[1:4],
        end_of_text,
    )
    noted = cache / "token-files" / f"{hashlib.sha256(repr(state).encode()).hexdigest()[:24]}.ends"
    if noted.is_file():  # a large file takes a while to check
        return np.load(noted, mmap_mode="r", allow_pickle=False)
    log.info("checking the %s tokens of %s once", f"{file.tokens:,}", file.path)
    tokens, bounds, ends, checksum = file.mapped(), [], [np.empty(0, np.int64)], 0
    for begin in range(0, file.tokens, TOKENS_CHUNK):
        piece = tokens[begin : begin + TOKENS_CHUNK]
        bounds += [int(piece.min()), int(piece.max())]
        checksum = zlib.crc32(piece.data, checksum)
        ends.append(begin + 1 + np.flatnonzero(piece == end_of_text))
    last = [] if tokens[-1] == end_of_text else [file.tokens]
    found = np.concatenate([[min(bounds), max(bounds), checksum], *ends, last]).astype(np.int64)
    with replacing(noted) as part, part.open("wb") as written:
        np.save(written, found, allow_pickle=False)
    return found
