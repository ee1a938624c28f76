"""Packed samples, compared with a plain implementation that copies the whole stream."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashtrain.data.packing import PackedSamples, Spans
from flashtrain.data.token_cache import MappedTokens, TokenFile
from flashtrain.errors import UserError


def write_tokens(folder, lengths, dtype="uint16"):
    tokens = np.arange(sum(lengths)).astype(dtype)
    tokens.tofile(folder / "tokens.bin")
    ends = np.cumsum(lengths)
    return folder / "tokens.bin", Spans(ends - lengths, ends)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("packing")


def packed(folder, lengths, context, document_mask=False, kept=None):
    path, spans = write_tokens(folder, lengths)
    if kept is not None:
        spans = Spans(spans.begins[kept], spans.ends[kept])
    tokens = MappedTokens([TokenFile(path, "uint16", 0, sum(lengths))])
    return PackedSamples(tokens, spans, context, document_mask)


def naive(lengths, kept, context, document_mask):
    """Every sample of the kept documents: (tokens, labels, documents, positions) as lists."""
    stream, of_document, start = [], [], 0
    for document, length in enumerate(lengths):
        if kept[document]:
            stream += range(start, start + length)
            of_document += [document] * length
        start += length
    samples = []
    for begin in range(0, len(stream) - context, context):
        row = of_document[begin : begin + context]
        tokens, labels = stream[begin : begin + context], stream[begin + 1 : begin + context + 1]
        documents = [len(set(row[: i + 1])) - 1 for i in range(context)]
        positions = list(range(context))
        if document_mask:
            positions = [i - row.index(row[i]) for i in range(context)]
            following = of_document[begin + 1 : begin + context + 1]
            labels = [label if row[i] == following[i] else -100 for i, label in enumerate(labels)]
        samples.append((tokens, labels, documents, positions))
    return samples


@given(
    st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=30), st.integers(1, 16), st.booleans()
)
def test_samples_are_those_of_the_plain_implementation(folder, documents, context, document_mask):
    lengths = [length for length, _ in documents]
    kept = np.array([keep for _, keep in documents])
    expected = naive(lengths, kept, context, document_mask)
    if not expected:
        return
    samples = packed(folder, lengths, context, document_mask, kept)
    assert len(samples) == len(expected)
    batch = samples[range(len(expected))]
    for name, values in zip(("tokens", "labels", "documents", "positions"), zip(*expected, strict=True), strict=True):
        assert batch[name].tolist() == list(values), name


def test_a_batch_has_the_shapes_and_types_that_are_promised(folder):
    batch = packed(folder, [7, 9], 5)[[2, 0]]
    assert {name: (tuple(value.shape), value.dtype) for name, value in batch.items()} == {
        "tokens": ((2, 5), torch.int64),
        "labels": ((2, 5), torch.int64),
        "documents": ((2, 5), torch.int32),
        "positions": ((2, 5), torch.int32),
    }
    assert batch["tokens"][0].tolist() == [10, 11, 12, 13, 14]


def test_with_a_mask_a_document_that_ends_with_the_row_has_no_last_label(folder):
    batch = packed(folder, [4, 4], 4, document_mask=True)[[0]]
    assert batch["labels"].tolist() == [[1, 2, 3, -100]]


def test_tokens_beyond_two_bytes_are_read(folder):
    spans = Spans(np.array([0]), np.array([3]))
    assert PackedSamples(np.array([70_000, 1, 2], "uint32"), spans, 2)[[0]]["tokens"].tolist() == [[70_000, 1]]


def test_it_travels_to_worker_processes_without_its_file(folder):
    samples = packed(folder, [1000] * 20, 5)
    first = samples[[0]]["tokens"]
    sent = pickle.dumps(samples)
    assert len(sent) < 5000
    assert torch.equal(pickle.loads(sent)[[0]]["tokens"], first)


def test_a_split_shorter_than_a_sample_is_told_with_the_numbers(folder):
    with pytest.raises(UserError, match=r"5 tokens are fewer than the 6 .* context=5"):
        packed(folder, [5], 5)
    assert len(packed(folder, [6], 5)) == 1


@pytest.mark.parametrize("sample", [-1, 3])
def test_a_sample_that_does_not_exist_is_an_index_error(folder, sample):
    with pytest.raises(IndexError, match=f"sample {sample} of 3"):
        packed(folder, [16], 5)[[sample]]


def test_tokens_past_two_thousand_million_are_found(tmp_path):
    path = tmp_path / "tokens.bin"
    size, where = 64, 2**32 + 12345
    with path.open("wb") as file:  # a hole of 8 GiB takes no room on the disk
        file.seek(2 * where)
        file.write(np.arange(1, size + 2).astype("uint16").tobytes())
    begins, ends = np.array([0, where - 10]), np.array([where - 10, where + size + 1])
    tokens = MappedTokens([TokenFile(path, "uint16", 0, where + size + 1)])
    samples = PackedSamples(tokens, Spans(begins, ends), size)
    last = samples[[len(samples) - 1]]
    begin = (len(samples) - 1) * size
    assert begin > 2**32
    stream = lambda places: torch.where(places < where, 0, places - where + 1)  # noqa: E731
    assert torch.equal(last["tokens"][0], stream(torch.arange(begin, begin + size)))
    assert torch.equal(last["labels"][0], stream(torch.arange(begin + 1, begin + size + 1)))
