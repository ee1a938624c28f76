"""Compressed files: of several parts, and cut short."""

from __future__ import annotations

import gzip
import lzma

import pyarrow
import pytest

from flashtrain.errors import UserError
from flashtrain.files.compressed_files import open_binary

COMPRESS = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": lambda text: pyarrow.compress(text, "zstd", True)}
TEXT = bytes(range(256)) * 4000


def read(path, content: bytes) -> bytes:
    path.write_bytes(content)
    with open_binary(path) as file:
        return file.read()


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_of_several_compressed_parts_is_read_to_its_end(tmp_path, suffix):
    compress = COMPRESS[suffix]
    parts = compress(TEXT) + compress(b"second") + compress(b"") * 2000 + compress(b"end")
    assert read(tmp_path / f"a.txt{suffix}", parts) == TEXT + b"secondend"


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("damage", ["cut", "cut in the second part", "cut in the first bytes", "followed by no part"])
def test_a_damaged_file_is_an_error_and_not_a_shorter_text(tmp_path, suffix, damage):
    whole = COMPRESS[suffix](TEXT)
    content = {
        "cut": whole[:-20],
        "cut in the second part": whole + whole[:-20],
        "cut in the first bytes": whole[:3],
        "followed by no part": whole + b"no part",
    }[damage]
    with pytest.raises(UserError, match=f"cannot read .*a.txt{suffix}: "):
        read(tmp_path / f"a.txt{suffix}", content)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_lines_are_the_same_as_uncompressed(tmp_path, suffix):
    lines = [f"line {number}\n".encode() for number in range(5000)]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](b"".join(lines)))
    with open_binary(path) as file:
        assert list(file) == lines
