"""Packed samples, compared with a plain implementation that copies the whole stream."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashtrain.data.packing import PackedSamples, Spans
from flashtrain.data.token_cache import MappedTokens, TokenFile
from flashtrain.errors import UserError


def packed(lengths, context, document_mask=False, kept=None):
    ends = np.cumsum(lengths)
    spans = Spans(ends - lengths, ends)
    if kept is not None:
        spans = Spans(spans.begins[kept], spans.ends[kept])
    return PackedSamples(np.arange(sum(lengths)).astype("uint16"), spans, context, document_mask)


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
    st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 16),
    st.booleans(),
)
def test_samples_are_those_of_the_plain_implementation(documents, context, document_mask):
    lengths = [length for length, _ in documents]
    kept = np.array([keep for _, keep in documents])
    expected = naive(lengths, kept, context, document_mask)
    if not expected:
        return
    samples = packed(lengths, context, document_mask, kept)
    assert len(samples) == len(expected)
    batch = samples[range(len(expected))]
    for name, values in zip(
        ("tokens", "labels", "documents", "positions"), zip(*expected, strict=True), strict=True
    ):
        assert batch[name].tolist() == list(values), name
        assert batch[name].dtype == (torch.int64 if name in ("tokens", "labels") else torch.int32)


def test_samples_come_in_the_order_asked_for():
    assert packed([7, 9], 5)[[2, 0]]["tokens"][:, 0].tolist() == [10, 0]


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


def test_documents_are_repeated_by_their_lengths_and_the_copies_are_far_apart():
    ends = np.cumsum([5, 20, 5, 40, 20])
    spans = Spans(ends - [5, 20, 5, 40, 20], ends)
    longer = spans.repeated([(40, 3), (10, 2)], seed=0)
    assert longer.lengths.tolist() == [5, 20, 5, 40, 20, 20, 40, 20, 40]
    tokens = PackedSamples(np.arange(90), longer, 5)[range(26)]["tokens"].flatten().tolist()
    assert tokens[:130] == [*range(90), *range(5, 25), *range(30, 50)]
    kept = spans.repeated([(1, 0), (20, 1)], seed=0)
    assert kept.lengths.tolist() == [20, 40, 20]


@pytest.mark.parametrize(("context", "left"), [(0, 0), (10, 10)])
def test_weights_that_leave_too_little_text_are_named_with_the_lengths_that_exist(context, left):
    spans = Spans(np.array([0, 5]), np.array([5, 45]))
    weights = [(1, left / 5), (20, 0)]
    given = rf"\[{{at_least:1,weight:{left // 5}}}, {{at_least:20,weight:0}}\]"
    with pytest.raises(UserError, match=f"{given} leave {left} of 45 .* 5 to 40 tokens"):
        spans.repeated(weights, seed=0, context=context)


def test_no_documents_are_no_samples():
    with pytest.raises(UserError, match="0 tokens are fewer than the 6 of one sample"):
        PackedSamples(np.arange(9), Spans(np.arange(0), np.arange(0)), 5)


def test_a_fraction_is_drawn_by_the_seed_and_the_documents_place_alone():
    ends = np.cumsum(np.full(4000, 7))
    spans = Spans(ends - 7, ends)

    def counts(seed, part=slice(None)):
        found = Spans(spans.begins[part], spans.ends[part]).repeated([(1, 1.25)], seed)
        return np.bincount(found.begins // 7, minlength=4000)[part]

    assert set(counts(0).tolist()) == {1, 2}
    assert abs(counts(0).sum() / 4000 - 1.25) < 0.03
    assert counts(0).tolist() != counts(1).tolist()
    # Other documents beside it, as another split, change none of its draws.
    assert counts(0)[1000:].tolist() == counts(0, slice(1000, None)).tolist()
