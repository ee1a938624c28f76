"""Every mask twice: as flashtrain_kernels.masks makes it, and as a rule about one pair of
tokens, written out by hand.

A batch is given as rows of documents, each document as the lengths of its segments: [[[3, 2], [4]],
[[9]]] has two rows of nine tokens; the first row's documents have five and four tokens, its first
document the segments of three and two.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from flashtrain_kernels import masks
from flashtrain_kernels.masks import Mask

Batch = list[list[list[int]]]


class Token(NamedTuple):
    """What the rules ask about a token: its index in the row, its document's first and past-last
    index, the number and first index of its segment in the document, the length of the document's
    first segment, and is its segment the last.
    """

    index: int
    start: int
    end: int
    segment: int
    segment_start: int
    question: int
    last: bool


class MaskCase(NamedTuple):
    """A mask, the rule it should obey, and the batch it was made for."""

    mask: Mask
    sees: Callable[[Token, Token], bool]
    batch: Batch

    def dense(self) -> torch.Tensor:
        """(Bm, S, S) bool by the rule."""
        rows = [tokens(row) for row in self.batch[: self.mask.queries.shape[1]]]
        return torch.tensor(
            [[[self.sees(query, key) for key in row] for query in row] for row in rows]
        )


def tokens(row: list[list[int]]) -> list[Token]:
    found: list[Token] = []
    for document in row:
        start = len(found)
        for number, length in enumerate(document):
            first = len(found)
            last = number == len(document) - 1
            for index in range(first, first + length):
                found.append(
                    Token(index, start, start + sum(document), number, first, document[0], last)
                )
    return found


def document_ids(batch: Batch) -> torch.Tensor:
    return torch.tensor(
        [[n for n, document in enumerate(row) for _ in range(sum(document))] for row in batch]
    )


def segment_ids(batch: Batch) -> torch.Tensor:
    """Numbers that start again in each document, as data sets write them."""
    return torch.tensor([[token.segment for token in tokens(row)] for row in batch])


def undivided(batch: Batch) -> Batch:
    """The same batch with one document a row."""
    return [[[length for document in row for length in document]] for row in batch]


def within_documents(
    batch: Batch,
    left: int = 5,
    right: int = 3,
    global_tokens: int = 4,
    documents: masks.Documents | None = None,
) -> dict[str, MaskCase]:
    """The masks that know documents, on a batch. documents: instead of its own."""
    ids, segments = documents or document_ids(batch), segment_ids(batch)
    prefix = torch.tensor([[token.question for token in tokens(row)] for row in batch])
    seqlen = segments.shape[1]

    def same(query: Token, key: Token) -> bool:
        return query.start == key.start

    def causal(query: Token, key: Token) -> bool:
        return same(query, key) and key.index <= query.index

    def window(query: Token, key: Token) -> bool:
        return same(query, key) and query.index - left <= key.index <= query.index + right

    def is_global(token: Token) -> bool:
        return token.index - token.start < global_tokens

    def block(token: Token) -> int:
        return (token.index - token.start) // 7

    made = {
        "full document": (masks.document(ids, causal=False), same),
        "causal document": (masks.document(ids, causal=True), causal),
        "full sliding window document": (
            masks.sliding_window(seqlen, (left, right), documents=ids), window
        ),
        "causal sliding window document": (
            masks.sliding_window(seqlen, (left, 0), documents=ids), lambda q,
            k: window(q, k) and causal(q, k)
        ),
        "shared question document": (
            masks.shared_question(segments, documents=ids),
            lambda q, k: causal(q, k) and k.segment in (0, q.segment),
        ),
        "global window document": (
            masks.global_window(seqlen, global_tokens, (left, right), documents=ids),
            lambda q, k: same(q, k) and (is_global(q) or is_global(k) or window(q, k)),
        ),
        "causal global window document": (
            masks.global_window(seqlen, global_tokens, (left, right), causal=True, documents=ids),
            lambda q, k: causal(q, k) and (is_global(q) or is_global(k) or window(q, k)),
        ),
        "causal blockwise document": (
            masks.causal_blockwise(segments, documents=ids),
            lambda q, k: causal(q, k) and (q.last or q.segment == k.segment),
        ),
        "prefix-LM document": (
            masks.prefix_lm(prefix, documents=ids), lambda q,
            k: same(q, k) and (k.segment == 0 or causal(q, k))
        ),
        "block-causal document": (
            masks.block_causal(7, ids), lambda q, k: same(q, k) and block(k) <= block(q)
        ),
    }  # fmt: skip
    return {name: MaskCase(mask, sees, batch) for name, (mask, sees) in made.items()}


def the_twelve(
    batch: Batch, left: int = 5, right: int = 3, global_tokens: int = 4
) -> dict[str, MaskCase]:
    """The benchmark's twelve masks, on a batch: those without documents take its
    rows as one document each."""
    whole = undivided(batch)
    apart = within_documents(batch, left, right, global_tokens)
    plain = within_documents(whole, left, right, global_tokens)
    segments, seqlen = segment_ids(whole), document_ids(whole).shape[1]
    prefix = torch.tensor([row[0][0] for row in whole])
    made = {
        "full": (masks.full(seqlen), plain["full document"]),
        "causal": (masks.causal(seqlen), plain["causal document"]),
        "full document": (None, apart["full document"]),
        "causal document": (None, apart["causal document"]),
        "full sliding window": (masks.sliding_window(seqlen, (left, right)),
            plain["full sliding window document"]),
        "causal sliding window": (masks.sliding_window(seqlen, (left, 0)),
            plain["causal sliding window document"]),
        "shared question": (masks.shared_question(segments), plain["shared question document"]),
        "global window": (
            masks.global_window(seqlen, global_tokens, (left, right)),
            plain["global window document"],
        ),
        "causal blockwise": (masks.causal_blockwise(segments), plain["causal blockwise document"]),
        "prefix-LM causal": (masks.prefix_lm(prefix, seqlen=seqlen), plain["prefix-LM document"]),
        "prefix-LM document": (None, apart["prefix-LM document"]),
        "block-causal document": (None, apart["block-causal document"]),
    }  # fmt: skip
    return {
        name: case if mask is None else case._replace(mask=mask)
        for name, (mask, case) in made.items()
    }


# Names for parametrize, in the order of the functions above.
EXAMPLE: Batch = [[[3, 4], [1], [5, 2, 6, 2]], [[8, 9], [6]]]
TWELVE = list(the_twelve(EXAMPLE))
DOCUMENT_MASKS = list(within_documents(EXAMPLE))
