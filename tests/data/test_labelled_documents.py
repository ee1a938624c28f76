"""Labelled documents from files and datasets, and the batches they make."""

from __future__ import annotations

import gzip
import json

import pytest

from flashtrain.data.labelled_documents import (
    LabelledSamples,
    MissingSplit,
    Row,
    dataset_rows,
    encode_rows,
    labelled_rows,
)
from flashtrain.data.tokenizers import ByteTokenizer
from flashtrain.data.wordpiece import SpecialTokens
from flashtrain.errors import UserError

ROWS = [Row("a text", ["x", "y"]), Row("another", []), Row("the third one", ["y"])]
SPECIAL = SpecialTokens.past(257)


def write(path, *rows) -> None:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))


def test_lines_of_a_file_or_of_a_folder_of_files_are_read_in_order(tmp_path):
    write(tmp_path / "a.jsonl", {"text": "a text", "labels": ["x", "y"]}, {"text": "another", "labels": []})
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": ["the", "third"], "labels": 7}) + "\n\n")
    first = [row._replace(where=f"{tmp_path / 'a.jsonl'}:{line}") for line, row in enumerate(ROWS[:2], start=1)]
    assert labelled_rows(tmp_path / "a.jsonl") == first
    assert labelled_rows(tmp_path) == [*first, Row("the\nthird", ["7"], f"{tmp_path / 'b.jsonl.gz'}:1")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{\n", "a.jsonl:1: not a JSON object on a line: Expecting property name enclosed in double quotes"),
        ("[1]", "a.jsonl:1: not a JSON object on a line: it is a list"),
        ({"text": "a"}, "a.jsonl:1: no column 'labels'. Possible: text"),
        ({"text": 3, "labels": []}, "'text' holds no text"),
        ({"text": "a", "labels": [None]}, r"'labels' holds \[None\]. Possible: strings or whole numbers"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, line, message):
    write(tmp_path / "a.jsonl", line)
    with pytest.raises(UserError, match=message):
        labelled_rows(tmp_path)


def test_where_nothing_is_to_be_read_is_one_line(tmp_path):
    for path in (tmp_path, tmp_path / "none.jsonl"):
        with pytest.raises(UserError, match="no labelled documents at"):
            labelled_rows(path)
    (tmp_path / "bad.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(UserError, match=r"cannot read .*bad.jsonl.gz"):
        labelled_rows(tmp_path)


def test_a_dataset_gives_its_labels_their_names(tmp_path):
    write(tmp_path / "train.jsonl", {"text": ["a", "b"], "labels": [1]}, {"text": ["c"], "labels": [0, 2]})
    assert [row[:2] for row in dataset_rows(str(tmp_path))] == [("a\nb", ["1"]), ("c", ["0", "2"])]
    assert [row[:2] for row in dataset_rows(str(tmp_path), most=1)] == [("a\nb", ["1"])]
    with pytest.raises(UserError, match=r"row 0: no column 'topics'. Possible: text, labels"):
        dataset_rows(str(tmp_path), labels_column="topics")
    with pytest.raises(MissingSplit, match=r"cannot load dataset .*, split test"):
        dataset_rows(str(tmp_path), split="test")


def test_documents_are_encoded_and_their_labels_numbered():
    documents = encode_rows(ROWS, ByteTokenizer())
    assert documents.label_names == ("x", "y")
    assert documents.labels.tolist() == [[True, True], [False, False], [False, True]]
    assert bytes(documents.document(2)[0].tolist()) == b"the third one"
    assert documents.lengths.tolist() == [6, 7, 13]
    with pytest.raises(UserError, match=r"document 0 has the label 'x'. Possible: y"):
        encode_rows(ROWS, ByteTokenizer(), ["y"])
    with pytest.raises(UserError, match=r"test.jsonl:7 has the label 'z'"):
        encode_rows([Row("a", ["z"], "test.jsonl:7")], ByteTokenizer(), ["y"])


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_batch_holds_documents_cut_to_the_context(layout):
    samples = LabelledSamples(encode_rows(ROWS, ByteTokenizer()), SPECIAL, 10, layout=layout)
    batch = samples[[2, 0]]
    expected = [[SPECIAL.classify, *text, SPECIAL.separate] for text in (b"the thir", b"a text")]
    assert batch["labels"].tolist() == [[0, 1], [1, 1]]
    if layout == "packed":
        assert batch["cu_seqlens"].tolist() == [0, 10, 18]
        assert batch["tokens"].tolist() == [*expected[0], *expected[1], SPECIAL.pad, SPECIAL.pad]
    else:
        assert batch["lengths"].tolist() == [10, 8]
        assert batch["tokens"].tolist() == [expected[0], [*expected[1], SPECIAL.pad, SPECIAL.pad]]


def test_samples_that_cannot_be_made_are_refused():
    with pytest.raises(UserError, match="context=2 must be at least 3"):
        LabelledSamples(encode_rows(ROWS, ByteTokenizer()), SPECIAL, 2)
    with pytest.raises(UserError, match="there are no labelled documents"):
        encode_rows([], ByteTokenizer())
