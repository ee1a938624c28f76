"""Files of text: which are read, what their bytes are as text, and what is said of
those that cannot be read."""

from __future__ import annotations

import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from flashtrain.data.chat_source import ChatFiles
from flashtrain.data.text_files import FilesSource, check_encoding, opened
from flashtrain.errors import UserError
from flashtrain.files import content_hashes

FRENCH = "Où était le garçon ? À l'école, évidemment, près du château. " * 40
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pyarrow.compress(data, "zstd", True),
}
BYTES = bytes(range(256)) * 4000
MIB = 2**20


def read(path: Path | str, **options: str) -> list[str]:
    return list(FilesSource(path, **options).documents())


def refusal(path: Path | str, **options: str) -> str:
    with pytest.raises(UserError) as caught:
        read(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_rows_without_a_text_are_no_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": "one", "n": 1}\n\n{"text": null}\n{"text": "zwei \\u00fc \\ud83d\\ude00"}\n'
    )
    table = pyarrow.table({"text": ["three", None, "four"], "author": ["a", "b", "c"]})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    assert read(tmp_path) == ["one", "zwei ü 😀", "three", "four"]
    assert read(tmp_path / "b.parquet", text_column="author") == ["a", "b", "c"]


def test_a_folder_is_read_in_order_of_paths_without_hidden_or_other_files_and_links_once(
    tmp_path: Path,
) -> None:
    for name in (
        "b.txt",
        "a/z.MD",
        "a/b/c.txt.gz",
        ".hidden.txt",
        ".git/x.txt",
        "picture.png",
        "table.parquet.gz",
    ):
        path = tmp_path / "real" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = b"PAR1\0" if "parquet" in name else b"\x89PNG" if "png" in name else name.encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "loop").symlink_to(tmp_path / "corpus")
    assert read(tmp_path / "corpus") == ["a/b/c.txt.gz", "a/z.MD", "b.txt"]


def test_the_fingerprint_follows_names_contents_and_the_column_but_no_times_and_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    path = folder / "a.txt"
    path.write_text("hello")
    first = FilesSource(folder).fingerprint()
    assert FilesSource(folder, encoding="UTF8").fingerprint() == first
    for other in ({"text_column": "body"}, {"encoding": "cp1252"}, {"encoding_errors": "replace"}):
        assert FilesSource(folder, **other).fingerprint() != first
    os.utime(path, ns=(1, 1))
    assert FilesSource(folder).fingerprint() == first
    path.write_text("hullo")
    os.utime(path, ns=(1, 1))  # of the same size and time
    changed = FilesSource(folder).fingerprint()
    assert changed != first
    folder.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("moved")
    for spelled in (tmp_path / "moved", "moved", "./moved/", "moved/../moved", "link"):
        assert FilesSource(spelled).fingerprint() == changed
    (tmp_path / "moved" / "b.txt").write_text("x")
    assert FilesSource(tmp_path / "moved").fingerprint() != changed


def test_a_file_is_read_once_for_its_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.txt").write_text("hello")
    first = FilesSource(tmp_path).fingerprint()
    read, hashed = content_hashes._hash, []
    monkeypatch.setattr(
        content_hashes, "_hash", lambda path: hashed.append(path.name) or read(path)
    )
    assert FilesSource(tmp_path).fingerprint() == first
    (tmp_path / "b.txt").write_text("hullo")
    assert FilesSource(tmp_path).fingerprint() != first
    assert hashed == ["b.txt"]


def test_the_size_estimate_counts_compressed_files_as_more_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 1000)
    assert FilesSource(tmp_path).approximate_bytes() == 1000
    (tmp_path / "b.txt.gz").write_bytes(b"x" * 1000)
    assert FilesSource(tmp_path).approximate_bytes() > 2000


def test_a_path_that_is_missing_or_not_read_says_what_is(tmp_path: Path) -> None:
    (tmp_path / "somewhere").mkdir()
    assert f"Did you mean {tmp_path / 'somewhere'}?" in refusal(tmp_path / "nowhere")
    assert "data.files='*.py'" in refusal(tmp_path / "*.py")
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    for path in (tmp_path, tmp_path / "a.png"):
        message = refusal(path)
        assert all(
            suffix in message
            for suffix in (".txt", ".md", ".jsonl", ".parquet", ".gz", ".xz", ".zst")
        )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{not json}", r"a.jsonl:2: .*Expecting property name"),
        (b'["a list"]', r"a.jsonl:2: .*a list"),
        (b'{"text": "cut \\ud83d"}', r"a.jsonl:2: .* surrogates not allowed"),
        (
            b'{"body": "x", "title": "y"}',
            r"a.jsonl:2: no column 'text', expected one of body, title",
        ),
        (b'{"text": 3}', r"a.jsonl:2: column 'text' holds a int"),
    ],
)
def test_a_line_that_is_no_text_is_named_by_file_and_line(
    tmp_path: Path, line: bytes, message: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(json.dumps({"text": "fine"}).encode() + b"\n" + line + b"\n")
    with pytest.raises(UserError, match=message):
        read(tmp_path)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_of_several_compressed_parts_is_read_to_its_end(tmp_path: Path, suffix: str) -> None:
    compress = COMPRESS[suffix]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(
        compress(BYTES) + compress(b"second") + compress(b"") * 2000 + compress(b"end")
    )
    with opened(path) as file:
        assert file.read() == BYTES + b"secondend"
    with opened(path) as file:
        assert [line.rstrip(b"\n") for line in file] == (BYTES + b"secondend").split(b"\n")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.xz", "a.txt.zst", "a.parquet"])
def test_a_file_that_is_not_what_its_name_says_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"this is no such file")
    assert f"cannot read {tmp_path / name}: " in refusal(tmp_path)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "cut in the second part", "cut in the first bytes"])
def test_a_damaged_file_is_an_error_and_not_a_shorter_text(
    tmp_path: Path, suffix: str, damage: str
) -> None:
    whole = COMPRESS[suffix](BYTES)
    cut = {
        "cut": whole[:-20],
        "cut in the second part": whole + whole[:-20],
        "cut in the first bytes": whole[:3],
    }
    (tmp_path / f"a.txt{suffix}").write_bytes(cut[damage])
    assert f"cannot read {tmp_path / 'a.txt'}{suffix}: " in refusal(tmp_path, encoding="latin-1")


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_a_byte_that_is_no_text_has_its_file_and_place_named(
    tmp_path: Path, kind: str, suffix: str
) -> None:
    path = tmp_path / f"a{kind}{suffix}"
    begin = b'{"text": "one"}\n{"text": "' if kind == ".jsonl" else b"one\r\ntwo"
    path.write_bytes(COMPRESS[suffix](begin + "garçon".encode("latin-1") + b'"}\n'))
    message = refusal(tmp_path)
    assert message.startswith(f"{path}, line 2: byte {len(begin) + 3} is not utf-8 text (")
    assert "data.encoding=" in message
    assert "data.encoding_errors=replace" in message


@pytest.mark.parametrize(
    ("content", "line", "byte"), [(b"x\n" * MIB + b"\xff", MIB + 1, 2 * MIB), (b"xx\xc3", 1, 2)]
)
def test_the_place_is_right_far_into_a_file_and_at_its_end(
    tmp_path: Path, content: bytes, line: int, byte: int
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert f"a.txt, line {line}: byte {byte:,} is" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        *(
            (name, FRENCH)
            for name in ("latin-1", "cp1252", "utf-16", "utf-16-le", "utf-32", "mac-roman", "UTF8")
        ),
        ("shift-jis", "吾輩は猫である。"),
    ],
)
def test_another_encoding_is_read_by_its_name_and_its_bad_byte_found(
    tmp_path: Path, encoding: str, words: str
) -> None:
    lines = f'{{"text": "{words}"}}\r\n\n{{"text": "x"}}\n'
    (tmp_path / "a.txt").write_bytes(words.encode(encoding))
    (tmp_path / "b.jsonl").write_bytes(lines.encode(encoding))
    assert read(tmp_path, encoding=encoding) == [words, words, "x"]
    if encoding == "shift-jis":
        (tmp_path / "b.jsonl").write_bytes(lines.encode(encoding) + b"\xff\xff")
        assert f"line 4: byte {len(lines.encode(encoding))} is not shift_jis text" in refusal(
            tmp_path, encoding="sjis"
        )


def test_utf_16_is_hinted_at_and_needs_its_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(FRENCH.encode("utf-16"))
    assert "data.encoding=utf-16)" in refusal(tmp_path)
    # Valid UTF-8, with a zero byte after each letter.
    path.write_bytes("plain words".encode("utf-16-le"))
    assert "line 1: found a zero byte" in refusal(tmp_path)
    assert "utf-16-le" in refusal(tmp_path, encoding="utf-16")  # which byte order, nothing says
    assert read(tmp_path, encoding="utf-16-le") == ["plain words"]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_replacing_goes_on_and_counts_the_bytes_of_each_file_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str
) -> None:
    compress = COMPRESS[suffix]
    (tmp_path / f"a.txt{suffix}").write_bytes(compress(b"x\xe9\xff"))
    (tmp_path / f"b.jsonl{suffix}").write_bytes(
        compress(b'{"text": "y\xe9"}\n{"text": "\\ud83d!"}\n')
    )
    (tmp_path / f"c.txt{suffix}").write_bytes(compress("fine \ufffd".encode()))
    source = FilesSource(tmp_path, encoding_errors="replace")
    texts = ["x\ufffd\ufffd", "y\ufffd", "?!", "fine \ufffd"]
    assert list(source.documents()) == list(source.documents()) == texts
    (line,) = [record.getMessage() for record in caplog.records]  # once, though it is read twice
    assert line.startswith("replaced 4 invalid bytes by U+FFFD: 2 of ")
    assert f"a.txt{suffix}, 2 of {tmp_path}" in line


def test_conversations_are_decoded_likewise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "some words"}\n' * 20 + b'{"text": "y\xe9"}\n')

    def rows(errors: str) -> list[str]:
        return [
            row["text"]
            for _, row in ChatFiles(tmp_path, encoding_errors=errors).rows(lambda error: None)
        ]

    with pytest.raises(UserError, match=r"a\.jsonl, line 21: byte "):
        rows("strict")
    assert rows("replace")[-1] == "y\ufffd"
    assert "replaced 1 invalid bytes by U+FFFD" in caplog.text


def test_an_encoding_goes_by_any_of_its_names_and_what_is_none_is_refused() -> None:
    assert check_encoding("Latin1") == check_encoding("iso-8859-1") == "iso8859-1"
    for name in ("rot13", "base64", "hex", "undefined", ""):
        with pytest.raises(UserError, match=r"unknown data\.encoding .*latin-1"):
            check_encoding(name)
