"""Which bytes are text: decoded strictly, replaced and counted where that is chosen, and which encodings there are."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import pyarrow
import pytest

from flashtrain.data.chat_source import ChatFiles
from flashtrain.data.sources import FilesSource
from flashtrain.data.streaming import StreamingDataModule
from flashtrain.data.text_encodings import check_encoding
from flashtrain.errors import UserError

FRENCH = "Où était le garçon ? À l'école, évidemment, près du château. " * 40
COMPRESS = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pyarrow.compress(data, "zstd", True),
}
MIB = 2**20


def read(path: Path, **options) -> list[str]:
    return list(FilesSource(path, **options).documents())


def refusal(path: Path, **options) -> str:
    with pytest.raises(UserError) as caught:
        read(path, **options)
    return str(caught.value)


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", [".txt", ".md", ".jsonl"])
def test_a_byte_that_is_no_text_has_its_file_and_place_named(tmp_path, kind, suffix) -> None:
    path = tmp_path / f"a{kind}{suffix}"
    begin = b'{"text": "one"}\n{"text": "' if kind == ".jsonl" else b"one\r\ntwo"
    path.write_bytes(COMPRESS[suffix](begin + "garçon".encode("latin-1") + b'"}\n'))
    message = refusal(tmp_path)
    assert message.startswith(f"{path}, line 2: byte {len(begin) + 3} is no utf-8 text (")
    assert "data.encoding=" in message
    assert "data.encoding_errors=replace" in message


@pytest.mark.parametrize(
    ("content", "line", "byte"),
    [
        (b"x\n" * MIB + b"\xff", MIB + 1, 2 * MIB),  # in a later piece
        (b"x" * (MIB - 1) + b"\xc3", 1, MIB - 1),  # half a character at the end
        (b"x" * (MIB - 1) + b"\xc3x", 1, MIB - 1),  # one that two pieces share
    ],
)
def test_the_place_is_right_wherever_the_file_is_read_in_pieces(tmp_path, content, line, byte) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert f"a.txt, line {line}: byte {byte:,} is" in refusal(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"x" * (MIB - 1) + "é".encode())
    assert read(tmp_path) == ["x" * (MIB - 1) + "é"]


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-16-le", "utf-32", "mac-roman", "UTF8"])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_another_encoding_is_read_by_its_name(tmp_path, encoding, kind) -> None:
    text = FRENCH if kind == "txt" else f'{{"text": "{FRENCH}"}}\r\n\n{{"text": "é"}}\n'
    (tmp_path / f"a.{kind}").write_bytes(text.encode(encoding))
    assert read(tmp_path, encoding=encoding) == ([FRENCH] if kind == "txt" else [FRENCH, "é"])


def test_an_east_asian_encoding_is_read_and_its_bad_byte_found(tmp_path) -> None:
    text = "吾輩は猫である。\n名前はまだ無い。\n"
    (tmp_path / "a.txt").write_bytes(text.encode("shift-jis"))
    assert read(tmp_path, encoding="shift-jis") == [text]
    (tmp_path / "a.txt").write_bytes(text.encode("shift-jis") + b"\xff\xff")
    assert f"line 3: byte {len(text.encode('shift-jis'))} is no shift_jis text" in refusal(tmp_path, encoding="sjis")


def test_utf_16_is_hinted_at_and_needs_its_mark(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(FRENCH.encode("utf-16"))
    assert "data.encoding=utf-16)" in refusal(tmp_path)
    path.write_bytes("plain words".encode("utf-16-le"))  # valid UTF-8, with a zero byte after each letter
    assert "line 1: a zero byte" in refusal(tmp_path)
    assert "utf-16-le" in refusal(tmp_path, encoding="utf-16")  # which byte order, nothing says
    assert read(tmp_path, encoding="utf-16-le") == ["plain words"]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_replacing_goes_on_and_counts_the_bytes_of_each_file_in_one_line(tmp_path, caplog, suffix) -> None:
    compress = COMPRESS[suffix]
    (tmp_path / f"a.txt{suffix}").write_bytes(compress(b"x\xe9\xff"))
    (tmp_path / f"b.jsonl{suffix}").write_bytes(compress(b'{"text": "y\xe9"}\n{"text": "\\ud83d!"}\n'))
    (tmp_path / f"c.txt{suffix}").write_bytes(compress("fine \ufffd".encode()))
    source = FilesSource(tmp_path, encoding_errors="replace")
    texts = ["x\ufffd\ufffd", "y\ufffd", "?!", "fine \ufffd"]
    assert list(source.documents()) == list(source.documents()) == texts
    (line,) = [record.getMessage() for record in caplog.records]  # once, though it is read twice
    assert line.startswith("4 bytes became U+FFFD: 2 of ")
    assert f"a.txt{suffix}, 2 of {tmp_path}" in line


def test_streamed_text_is_decoded_likewise(tmp_path, caplog) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "some words"}\n' * 20 + b'{"text": "y\xe9"}\n')
    options = {"tokenizer": "bytes", "context": 8, "batch_size": 1, "validation_fraction": 0, "total_steps": 40}

    def stream(errors: str) -> int:
        data = StreamingDataModule(FilesSource(tmp_path, encoding_errors=errors), **options)
        data.setup()
        return len(list(data.train_dataloader()))

    with pytest.raises(UserError, match=r"a\.jsonl, line 21: byte "):
        stream("strict")
    assert stream("replace") == 40
    assert "1 bytes became U+FFFD" in caplog.text


def test_conversations_are_decoded_likewise(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "y\xe9"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: byte 11 "):
        list(ChatFiles(tmp_path).rows(lambda error: None))
    rows = ChatFiles(tmp_path, encoding_errors="replace").rows(lambda error: None)
    assert [row["text"] for _, row in rows] == ["y\ufffd"]


def test_half_of_a_surrogate_pair_has_its_line_named_and_a_whole_pair_is_text(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n{"text": "cut \\ud83d"}\n')
    assert "a.jsonl:2: half of a surrogate pair ('\\ud83d')" in refusal(tmp_path)
    assert read(tmp_path, encoding_errors="replace") == ["😀", "cut ?"]


def test_an_encoding_goes_by_any_of_its_names() -> None:
    assert check_encoding("Latin1") == check_encoding("iso-8859-1") == "iso8859-1"
    assert check_encoding("U8") == "utf-8"


@pytest.mark.parametrize("name", ["rot13", "base64", "hex", "undefined", ""])
def test_what_is_no_encoding_of_text_is_refused(name) -> None:
    with pytest.raises(UserError, match=r"unknown data\.encoding .*Possible: .*latin-1"):
        check_encoding(name)


def test_the_encoding_is_part_of_the_fingerprint_but_utf_8_is_as_before(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("x")
    plain = FilesSource(tmp_path).fingerprint()
    assert FilesSource(tmp_path, encoding="UTF8").fingerprint() == plain
    assert FilesSource(tmp_path, encoding="cp1252").fingerprint() != plain
    assert FilesSource(tmp_path, encoding_errors="replace").fingerprint() != plain
