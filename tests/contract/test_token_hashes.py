"""Which token ids a file's bytes become, document by document, written down as hashes."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from chat_folders import save_tokenizer_folder

from flashtrain.data.datamodule import TextDataModule
from flashtrain.data.tokenizers import TokenizerSpec

WORDS = "The quick brown fox jumps over the lazy dog. " * 3
ODD = "Où était le garçon ? 東京 \U0001f600 e\u0301 \u2028 \x0c\ttab"
LINES = ["one", "two\r\nthree", "quick\ufeffbrown", ODD]

# Each file's bytes, and the documents that they are: line ends as they stand, a byte order mark
# at the beginning gone.
FILES: dict[str, tuple[bytes, list[str]]] = {
    "a-line-feeds.txt": (b"one\ntwo\n\nthree\n", ["one\ntwo\n\nthree\n"]),
    "b-crlf.txt": (b"one\r\ntwo\r\n", ["one\r\ntwo\r\n"]),
    "c-lone-cr.txt": (b"one\rtwo\r", ["one\rtwo\r"]),
    "d-mark.txt": (b"\xef\xbb\xbfone\r\ntwo", ["one\r\ntwo"]),
    "e-odd.txt": (ODD.encode(), [ODD]),
    "f-empty.txt": (b"", []),
    "g.txt.gz": (gzip.compress(WORDS.encode()), [WORDS]),
    "h.txt.xz": (lzma.compress(b"\xef\xbb\xbf" + WORDS.encode()), [WORDS]),
    "i.txt.zst": (zstandard.compress(b"one\r\ntwo"), ["one\r\ntwo"]),
    "j.jsonl": ("".join(json.dumps({"text": line}) + "\n" for line in LINES).encode(), LINES),
    "k.jsonl": (b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"n": 1, "text": "\xc3\xa9"}', ["one", "é"]),
    "l.jsonl.gz": (gzip.compress(b'{"text": "2020-01-01T00:00:00"}\n'), ["2020-01-01T00:00:00"]),
    "m.parquet": (b"", LINES),
    "n.md": (b"# A page\n\t<|im_end|>", ["# A page\n\t<|im_end|>"]),
}
TEXTS = [text for _, texts in FILES.values() for text in texts]

# By the tokenizer: the first 12 hexadecimal digits of the sha256 of each document's ids, as
# little-endian int64.
HASHES: dict[str, str] = {
    "bytes": (
        "e4d7d2043b0f 7165445671cb eb8095906302 eb98966d0b3f 9ca103cf04ac 5d9cf76f7f6e "
        "5d9cf76f7f6e eb98966d0b3f 51049d378da6 533530812ef6 9baf9d7ea2cf 9ca103cf04ac "
        "51049d378da6 bc08e993d8de 178393103ec9 51049d378da6 533530812ef6 9baf9d7ea2cf "
        "9ca103cf04ac 27b2a60c541f"
    ),
    "bpe": (
        "4fb1aa8f8766 596a1b7224f9 b6f270d1f044 0d6c5a6faaec f1a1b97f581d b192c49cfbcf "
        "b192c49cfbcf 0d6c5a6faaec 6700e4d7a5d3 86beaaaef9e1 6ba94509e2fe f1a1b97f581d "
        "6700e4d7a5d3 8f1170d470ce 3ad085f48afc 6700e4d7a5d3 86beaaaef9e1 6ba94509e2fe "
        "f1a1b97f581d 9450300e42df"
    ),
    "folder": (
        "2df7e7059058 a8fb945bbf5e ac9b5d5a008b 8684532816bb e9c30b998e2d 2b41e1035b6a "
        "2b41e1035b6a 8684532816bb 78c88ad50bec 5bd509dd4538 40c1219da0ee e9c30b998e2d "
        "78c88ad50bec c1a33625788b c098bc8586f0 78c88ad50bec 5bd509dd4538 40c1219da0ee "
        "e9c30b998e2d 1f23de7b9592"
    ),
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    for name, (content, _) in FILES.items():
        (folder / name).write_bytes(content)
    pyarrow.parquet.write_table(
        pyarrow.table({"text": LINES, "n": range(len(LINES))}), folder / "m.parquet"
    )
    return folder


def documents(source: Path, tokenizer: object, cache: Path) -> list[np.ndarray]:
    """The ids of each document in the order of the files, as data preparation
    leaves them for training."""
    data = TextDataModule(source, tokenizer, context=4, cache_dir=cache)
    data.setup()
    return np.split(np.asarray(data.cache.tokens, dtype="<i8"), data.cache.offsets[1:-1])


@pytest.mark.parametrize("name", HASHES)
def test_each_document_has_the_token_ids_that_it_always_had(
    name: str, files: Path, tmp_path: Path
) -> None:
    tokenizers = {
        "bytes": lambda: "bytes",
        "bpe": lambda: TokenizerSpec("bpe", vocab_size=300),  # trained on these files
        "folder": lambda: str(
            save_tokenizer_folder(tmp_path / "tokenizer", words=WORDS, begins=True)
        ),
    }
    found = documents(files, tokenizers[name](), tmp_path / "cache")
    assert len(found) == len(TEXTS)
    if name == "bytes":
        assert [ids.tolist() for ids in found] == [[*text.encode(), 256] for text in TEXTS]
    assert " ".join(hashlib.sha256(ids.tobytes()).hexdigest()[:12] for ids in found) == HASHES[name]
