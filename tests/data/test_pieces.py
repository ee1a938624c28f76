"""Samples of their real lengths: sentences, paragraphs, documents; every token in exactly one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtrain.data.bpe import BPETokenizer
from flashtrain.data.packing import Spans
from flashtrain.data.pieces import TokenBreaks, split_pieces
from flashtrain.data.tokenizers import ByteTokenizer

BYTES = ByteTokenizer()
BREAKS = TokenBreaks.of(BYTES)


def cut(texts: list[str], tokenizer=BYTES, breaks=BREAKS, **options) -> tuple[list[str], list[int]]:
    """The pieces of these documents as text, and each one's document."""
    documents = [
        np.append(tokenizer.encode(text), tokenizer.end_of_text).astype(np.int64) for text in texts
    ]
    ends = np.cumsum([len(document) for document in documents])
    tokens = np.concatenate(documents)
    spans = Spans(np.concatenate(([0], ends[:-1])), ends)
    options = {
        "unit": "paragraph",
        "longest": 1000,
        "end_of_text": tokenizer.end_of_text,
        **options,
    }
    pieces = split_pieces(tokens, spans, breaks, **options)
    found = [tokenizer.decode(tokens[b:e]) for b, e in zip(pieces.begins, pieces.ends, strict=True)]
    return found, np.searchsorted(ends, pieces.begins, side="right").tolist()


def test_a_paragraph_ends_at_an_empty_line_whatever_its_line_ends():
    text = "one line\nand another\n\nsecond\r\n \r\nthird"
    found, documents = cut([text, "fourth"])
    assert [piece.strip() for piece in found] == [
        "one line\nand another",
        "second",
        "third",
        "fourth",
    ]
    assert documents == [0, 0, 0, 1]


def test_a_sentence_ends_at_its_mark_before_white_space_and_at_an_empty_line():
    text = "It is 3.5 m. Is it? Yes!\n\nA heading\n\nEnd."
    found, _ = cut([text], unit="sentence")
    assert [piece.strip() for piece in found] == [
        "It is 3.5 m.",
        "Is it?",
        "Yes!",
        "A heading",
        "End.",
    ]


def test_a_trained_bpe_breaks_where_bytes_do():
    text = 'He said: "No." She left.\n\nThen\nnothing happened. At all.'
    tokenizer = BPETokenizer.train([text] * 20, 300)
    found, _ = cut([text], tokenizer, TokenBreaks.of(tokenizer), unit="sentence")
    assert [piece.strip() for piece in found][-2:] == ["Then\nnothing happened.", "At all."]
    found, _ = cut([text], tokenizer, TokenBreaks.of(tokenizer), unit="paragraph")
    assert len(found) == 2


def test_documents_are_cut_to_the_longest_and_their_end_shares_with_the_piece_before():
    assert cut(["x" * 25], unit="document", longest=10)[0] == ["x" * 10, "x" * 10, "x" * 5]
    assert cut(["x" * 22], unit="document", longest=10, shortest=4)[0] == [
        "x" * 10,
        "x" * 6,
        "x" * 6,
    ]


def test_a_short_paragraph_is_joined_to_the_next_and_the_last_to_the_one_before():
    found, _ = cut(["I.\n\nA long paragraph here\n\nAnother one of them\n\nEnd"], shortest=8)
    assert [piece.strip() for piece in found] == [
        "I.\n\nA long paragraph here",
        "Another one of them\n\nEnd",
    ]


@settings(max_examples=80)
@given(
    texts=st.lists(st.text(st.sampled_from("ab.\n "), max_size=60), min_size=1, max_size=5),
    unit=st.sampled_from(["sentence", "paragraph", "document"]),
    longest=st.integers(1, 30),
    shortest=st.integers(1, 30),
)
def test_every_token_of_a_text_is_in_exactly_one_piece_of_its_document(
    texts, unit, longest, shortest
):
    shortest = min(shortest, longest)
    found, documents = cut(texts, unit=unit, longest=longest, shortest=shortest)
    joined = [
        "".join(p for p, d in zip(found, documents, strict=True) if d == n)
        for n in range(len(texts))
    ]
    assert joined == texts
    assert all(1 <= len(piece) <= longest for piece in found)
