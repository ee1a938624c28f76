"""Which bytes are text: what is replaced and counted, what is refused, and which encodings there are."""

from __future__ import annotations

import gzip
import random
import struct
import sys
import zlib
from pathlib import Path

import pytest

from flashtrain.data.sources import FilesSource
from flashtrain.data.text_files import check_encoding, decode_text
from flashtrain.errors import UserError

FRENCH = "Où était le garçon ? À l'école, évidemment, près du château. " * 40
RANDOM = random.Random(0).randbytes(300_000)


def read(path: Path, **options) -> list[str]:
    return list(FilesSource(path, **options).documents())


def told(path: Path, **options) -> str:
    with pytest.raises(UserError) as caught:
        read(path, **options)
    return str(caught.value)


def picture() -> bytes:
    rows = b"".join(b"\0" + RANDOM[row * 300 : row * 300 + 300] for row in range(100))
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", 100, 100, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )


NO_TEXT = {
    "random bytes": RANDOM,
    "a few random bytes": RANDOM[:64],
    "Latin-1": FRENCH.encode("latin-1"),
    "a program": Path(sys.executable).resolve().read_bytes()[:500_000],
    "a picture": picture(),
    "an archive": gzip.compress(RANDOM),
    "zeros": bytes(1000),
    "UTF-16 without its mark": "plain words".encode("utf-16-le"),
    "text and then none": b"words " * 10_000 + RANDOM[:20_000],
}


@pytest.mark.parametrize("kind", NO_TEXT)
def test_a_file_that_is_no_text_is_refused_by_name_with_the_share(tmp_path, kind) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(NO_TEXT[kind])
    message = told(tmp_path)
    assert message.startswith(f"{path}: ")
    assert "% of its bytes are no UTF-8 text; if it is in another encoding, say data.encoding=latin-1." in message


def test_of_a_long_file_that_is_no_text_only_the_beginning_is_decoded(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes(RANDOM * 8)
    assert "of its first 1,048,576 bytes are no UTF-8 text" in told(tmp_path)


def test_up_to_one_percent_becomes_a_mark_with_one_line_that_counts(tmp_path, caplog) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 990 + b"\xe9\xff" * 5)
    source = FilesSource(path)
    assert list(source.documents()) == list(source.documents()) == ["x" * 990 + "\ufffd" * 10]
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: 10 bytes are no UTF-8 and become U+FFFD"
    ]  # once, though it is read twice
    path.write_bytes(b"x" * 989 + b"\xe9\xff" * 5 + b"\xff")
    assert "1.1% of its bytes" in told(path)


def test_replacing_in_pieces_gives_what_python_gives_at_once(tmp_path) -> None:
    content = ("ü€😀" * 200_000).encode() + b"\xf0\x9f\x98" + b"end \x80"
    found = decode_text(content, tmp_path / "a.txt")
    assert found.text == content.decode("utf-8", errors="replace")
    assert found.invalid == 4


def test_line_feeds_tabs_form_feeds_and_colours_are_text(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\x0c\t\x1b[31mred\x1b[0m\r\n" * 100)
    assert read(tmp_path)


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-16-le", "utf-32", "mac-roman", "UTF8"])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_another_encoding_is_read_as_it_is_told(tmp_path, encoding, kind) -> None:
    text = FRENCH if kind == "txt" else f'{{"text": "{FRENCH}"}}\n\n{{"text": "é"}}\n'
    (tmp_path / f"a.{kind}").write_bytes(text.encode(encoding))
    assert read(tmp_path, encoding=encoding) == ([FRENCH] if kind == "txt" else [FRENCH, "é"])


def test_a_byte_order_mark_is_hinted_at_and_missed(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes(FRENCH.encode("utf-16"))
    assert "say data.encoding=utf-16." in told(tmp_path)
    (tmp_path / "a.txt").write_bytes(FRENCH.encode())
    assert "no byte order mark: say data.encoding=utf-16-le or utf-16-be" in told(tmp_path, encoding="utf-16")
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.jsonl").write_bytes('{"text": "é"}\n'.encode("utf-16-le"))
    assert "a.jsonl is no utf-16 text (UTF-16 stream does not start with BOM)" in told(tmp_path, encoding="utf-16")


def test_what_is_no_text_in_another_encoding_either_is_refused(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes(RANDOM)
    assert "no iso8859-1 text; is it in another encoding" in told(tmp_path, encoding="latin-1")
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.jsonl").write_bytes('{"text": "é"}\n'.encode("latin-1"))
    assert "a.jsonl is no ascii text" in told(tmp_path, encoding="ascii")
    assert "a.jsonl:1: not a JSON object on a line: byte 11 of the line is no UTF-8" in told(tmp_path)


def test_an_encoding_goes_by_any_of_its_names() -> None:
    assert check_encoding("Latin1") == check_encoding("iso-8859-1") == "iso8859-1"
    assert check_encoding("U8") == "utf-8"


@pytest.mark.parametrize(
    "name", ["rot13", "base64", "hex", "idna", "punycode", "unicode_escape", "raw-unicode-escape", "undefined", ""]
)
def test_what_is_no_encoding_of_files_is_refused(name) -> None:
    with pytest.raises(UserError, match=r"unknown data\.encoding .*Possible: .*latin-1"):
        check_encoding(name)


def test_a_misspelt_encoding_gets_its_near_names() -> None:
    with pytest.raises(UserError, match=r"Did you mean .*'latin-1'"):
        check_encoding("latin-one")


def test_the_encoding_is_part_of_the_fingerprint_but_utf_8_is_as_before(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("x")
    plain = FilesSource(tmp_path).fingerprint()
    assert FilesSource(tmp_path, encoding="UTF8").fingerprint() == plain
    assert FilesSource(tmp_path, encoding="cp1252").fingerprint() != plain
    assert FilesSource(tmp_path, longest_document=9).fingerprint() == plain
