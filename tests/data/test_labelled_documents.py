"""Labelled texts from files and datasets, of whole texts and of words, and
the batches they make."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from flashtrain.data.labelled_documents import LabelledSamples
from flashtrain.data.labelled_rows import (
    Columns,
    Row,
    dataset_rows,
    encode_rows,
    file_rows,
    labels_in,
)
from flashtrain.data.tokenizers import ByteTokenizer
from flashtrain.data.wordpiece import SpecialTokens
from flashtrain.errors import UserError

ROWS = [Row("a text", ["x", "y"]), Row("another", []), Row("the third one", ["y"])]
OF_WORDS = [Row(["ab", "c"], ["X", "O"]), Row(["d"], ["X"])]
SPECIAL = SpecialTokens.past(257)


def write(path, *rows) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def encoded(rows, *, of_words=False):
    return encode_rows(rows, ByteTokenizer(), labels_in(rows), of_words=of_words)


def test_lines_and_tables_are_rows_in_order(tmp_path):
    lines = write(
        tmp_path / "a.jsonl",
        {"text": "a text", "labels": ["x", "y"]},
        {"text": "another", "labels": []},
    )
    assert [row[:2] for row in file_rows(lines, Columns())] == [row[:2] for row in ROWS[:2]]
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": ["the", "third"], "labels": 7}) + "\n\n")
    (row,) = file_rows(tmp_path / "b.jsonl.gz", Columns())
    assert row == Row("the\nthird", ["7"], f"{tmp_path / 'b.jsonl.gz'}:1")
    table = pyarrow.table({"words": [["ab", "c"], ["d"]], "labels": [["X", "O"], ["X"]]})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    of_words = file_rows(tmp_path / "c.parquet", Columns("words", of_words=True))
    assert [row[:2] for row in of_words] == [row[:2] for row in OF_WORDS]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{\n", "a.jsonl:1: "),
        ("[1]", "a.jsonl:1: "),
        ({"text": "a"}, r"a.jsonl:1: no column 'labels'.* \(.*labels_column"),
        ({"text": 3, "labels": []}, "'text' holds 3"),
        ({"text": "a", "labels": [None]}, r"'labels' holds \[None\]"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, line, message):
    with pytest.raises(UserError, match=message):
        file_rows(write(tmp_path / "a.jsonl", line), Columns())


def test_a_dataset_gives_its_splits_and_its_labels_their_names(tmp_path):
    datasets = pytest.importorskip("datasets")
    write(
        tmp_path / "train.jsonl",
        {"text": ["a", "b"], "labels": [1]},
        {"text": ["c"], "labels": [0, 2]},
    )
    write(tmp_path / "dev.jsonl", {"text": ["d"], "labels": [1]})
    found = dataset_rows(str(tmp_path), None, Columns())
    assert [row[:2] for row in found["train"]] == [("a\nb", ["1"]), ("c", ["0", "2"])]
    assert [row[:2] for row in found["validation"]] == [("d", ["1"])]
    assert "test" not in found
    assert len(dataset_rows(str(tmp_path), None, Columns(), {"train": 1})["train"]) == 1
    with pytest.raises(UserError, match=r"split train, row 0: no column 'topics'"):
        dataset_rows(str(tmp_path), None, Columns(labels="topics"))
    features = datasets.Features(
        {"text": datasets.Value("string"), "labels": datasets.ClassLabel(names=["no", "yes"])}
    )
    table = datasets.Dataset.from_dict({"text": ["e"], "labels": [1]}, features=features)
    (tmp_path / "named").mkdir()
    table.to_parquet(tmp_path / "named" / "train.parquet")
    assert dataset_rows(str(tmp_path / "named"), None, Columns())["train"][0].labels == ["yes"]


def test_documents_are_encoded_and_their_labels_numbered():
    documents = encoded(ROWS)
    assert documents.label_names == ("x", "y")
    assert [labels.tolist() for labels in documents.labels] == [
        [True, True],
        [False, False],
        [False, True],
    ]
    assert bytes(documents.document(2)[0].tolist()) == b"the third one"
    assert documents.lengths.tolist() == [6, 7, 13]
    for rows, of_words in (
        ([Row("a", ["z"], "test.jsonl:7")], False),
        ([Row(["a"], ["z"], "test.jsonl:7")], True),
    ):
        with pytest.raises(UserError, match=r"test.jsonl:7 has the label 'z': expected x, y"):
            encode_rows(rows, ByteTokenizer(), ["x", "y"], of_words=of_words)


def test_the_first_token_of_a_word_has_its_label():
    texts = encoded(OF_WORDS, of_words=True)
    assert texts.label_names == ("O", "X")
    assert [bytes(tokens.tolist()) for tokens in texts.tokens] == [b"ab c", b"d"]
    assert [labels.tolist() for labels in texts.labels] == [[1, -100, 0, -100], [1]]


def test_a_batch_holds_documents_cut_to_the_context():
    batch = LabelledSamples(encoded(ROWS), SPECIAL, 10)[[2, 0]]
    expected = [[SPECIAL.classify, *text, SPECIAL.separate] for text in (b"the thir", b"a text")]
    assert batch["labels"].tolist() == [[0, 1], [1, 1]]
    assert (batch["sequences"], batch["real_tokens"], batch["pairs"]) == (2, 18, 164)
    assert batch["cu_seqlens"].tolist() == [0, 10, 18]
    assert batch["tokens"].tolist() == [*expected[0], *expected[1], SPECIAL.pad, SPECIAL.pad]


def test_batches_lay_labels_of_words_out_as_their_tokens():
    batch = LabelledSamples(encoded(OF_WORDS, of_words=True), SPECIAL, 5, of_words=True)[[0, 1]]
    first, second = [-100, 1, -100, 0, -100], [-100, 1, -100]
    assert batch["cu_seqlens"].tolist() == [0, 5, 8]
    assert batch["labels"].tolist() == [*first, *second, -100, -100]
    assert batch["tokens"].shape == batch["labels"].shape
