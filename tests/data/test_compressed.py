"""Compressed files: of several parts, and cut short."""

from __future__ import annotations

import gzip
import lzma
import os

import pytest
import zstandard

from flashtrain.files.foreign_files import BROKEN_FILE_ERRORS, open_binary

COMPRESS = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress}
TEXT = bytes(range(256)) * 4000


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_of_several_compressed_parts_is_read_to_its_end(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](TEXT) + COMPRESS[suffix](b"second"))
    with open_binary(path) as file:
        assert file.read() == TEXT + b"second"


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_cut_short_is_an_error_and_not_a_shorter_text(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](TEXT)[:-20])
    with pytest.raises(BROKEN_FILE_ERRORS), open_binary(path) as file:
        file.read()


@pytest.mark.parametrize("suffix", COMPRESS)
def test_lines_are_the_same_as_uncompressed(tmp_path, suffix):
    lines = [f"line {number}\n".encode() for number in range(5000)]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](b"".join(lines)))
    with open_binary(path) as file:
        assert list(file) == lines


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_zeros_after_a_part_are_padding_unless_they_are_a_hole_of_gigabytes(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](TEXT) + bytes(10_240) + COMPRESS[suffix](b"second"))
    with open_binary(path) as file:
        assert file.read() == TEXT + b"second"
    os.truncate(path, 16 * 2**30)
    with pytest.raises(OSError, match="more than 1,048,576 zeros follow"), open_binary(path) as file:
        file.read()


@pytest.mark.parametrize("suffix", [".gz", ".xz"])  # a frame of .zst has no checksum unless asked for
def test_a_changed_byte_is_noticed(tmp_path, suffix):
    content = bytearray(COMPRESS[suffix](TEXT))
    content[-6] ^= 1
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(content)
    with pytest.raises(BROKEN_FILE_ERRORS), open_binary(path) as file:
        file.read()
