"""Packed text: documents laid end to end and cut into rows of one length, without padding.

B batch (rows of the micro-batch on this device), S sequence (the context length in tokens).

The documents of a split, in order, are one stream of tokens. Sample n reads stream[n*S : n*S + S + 1]: its first S
tokens are the input, its last S the labels, so that every token of the stream is a label once an epoch. The stream is
never copied: a row is read from the token file through the offsets of its documents.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flashtrain.errors import UserError

IGNORED_LABEL = -100
"""The label of a position that has no target; torch's cross_entropy leaves it out by default."""


class Batch(TypedDict):
    """Packed rows of text, without padding.

    tokens (B, S) int64.
    labels (B, S) int64: the token that follows each position, -100 where there is none to learn.
    documents (B, S) int32: ordinal of the document within its row, from 0, non-decreasing along S.
    positions (B, S) int32: 0 to S-1; with a document mask, counted anew from each document's first token in the row.
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor
    positions: Tensor


class ChatBatch(Batch):
    """A Batch whose labels are -100 but for what is to be learnt.

    weight: what the micro-batch's mean loss is multiplied by. The mean over a step's micro-batches and devices is then
    the mean over all labels of the step, wherever each came to lie: a mean of the micro-batches' own means would count
    the labels of a row with few of them more than others. label_count: the labels of that mean.
    """

    weight: float
    label_count: int


log = logging.getLogger(__name__)


class Spans(NamedTuple):
    """Documents, or parts of them, as ranges of the token file. Both arrays are (documents,) int64, in file order."""

    begins: np.ndarray
    ends: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return self.ends - self.begins

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


class Split(NamedTuple):
    """What is trained on and what is held out; `validation` is None when nothing is."""

    training: Spans
    validation: Spans | None


def split_documents(offsets: np.ndarray, *, fraction: float, context: int, seed: int = 0) -> Split:
    """Hold out about `fraction` of the documents, drawn at random, and no document on both sides.

    offsets: (documents + 1,) int64, as in a token cache. fraction: of the documents; 0 holds out nothing, 1 all.
    context: S, in tokens. Both sides get at least one sample's worth (S + 1 tokens) wherever the corpus has that.

    At least one document is held out, more when they are short. A document of more than twice the share (which would
    turn 1% into half of a corpus of few documents) is held out only if no other choice is left, the shortest
    sufficient one first. Where no whole document can be spared, as in a corpus of one, the last tokens of the longest
    document are held out instead, with one logged line; where not even those, nothing is, with one logged line.

    Deterministic in its arguments. Raises UserError when the corpus is shorter than one sample.
    """
    begins, ends = np.asarray(offsets[:-1]), np.asarray(offsets[1:])
    lengths = ends - begins
    total, sample = int(lengths.sum()), context + 1
    if total < sample and fraction != 1:
        raise UserError(
            f"the corpus has {total:,} tokens, fewer than the {sample:,} of one sample with context={context}. "
            f"Use {f'a context of at most {total - 1}, or ' if total > 16 else ''}more text."
        )
    if fraction in (0, 1):
        whole, nothing = Spans(begins, ends), Spans(begins[:0], ends[:0])
        return Split(nothing, whole) if fraction else Split(whole, None)
    held = _held_out(lengths, fraction, sample, seed)
    if held is not None:
        mask = np.zeros(len(lengths), dtype=bool)
        mask[held] = True
        return Split(Spans(begins[~mask], ends[~mask]), Spans(begins[mask], ends[mask]))
    longest = int(lengths.argmax())
    tail = max(sample, round(fraction * total))
    if lengths[longest] > tail and total - tail >= sample:
        log.warning(
            "no whole document can be held out: the last %s tokens of the longest one are used for validation",
            f"{tail:,}",
        )
        cut = int(ends[longest]) - tail
        kept = ends.copy()
        kept[longest] = cut
        return Split(Spans(begins, kept), Spans(np.array([cut]), ends[longest : longest + 1]))
    log.warning(
        "the corpus of %s tokens is too small to hold any out for validation with context=%s", f"{total:,}", context
    )
    return Split(Spans(begins, ends), None)


def _held_out(lengths: np.ndarray, fraction: float, sample: int, seed: int) -> np.ndarray | None:
    """The documents to hold out, or None when no choice leaves enough on both sides."""
    total = int(lengths.sum())
    wanted = max(1, min(round(fraction * len(lengths)), len(lengths) - 1))
    # RandomState's stream is frozen: the split stays the same under every version of numpy.
    order = np.random.RandomState(seed).permutation(len(lengths))
    order = order[lengths[order] <= max(2 * fraction * total, 2 * sample)]
    growing = lengths[order].cumsum()
    if len(order) and growing[-1] >= sample:
        count = max(min(wanted, len(order)), int(np.searchsorted(growing, sample)) + 1)
        if _leaves_enough(total, int(growing[count - 1]), fraction, sample):
            return order[:count]
    sufficient = np.flatnonzero(lengths >= sample)
    if len(sufficient):
        shortest = sufficient[lengths[sufficient].argmin()]
        if _leaves_enough(total, int(lengths[shortest]), fraction, sample):
            return np.array([shortest])
    return None


def _leaves_enough(total: int, held: int, fraction: float, sample: int) -> bool:
    return total - held >= max(sample, 0.5 * (1 - fraction) * total)


class PackedSamples(Dataset[Batch]):
    """The samples of one split; indexed by a sequence of sample numbers, it gives them as one Batch.

    tokens: of which slices are read (token_cache.MappedTokens). spans: the split's documents in them. context: S.
    document_mask: positions restart at each document, and the label that would be the next document's first token is
    -100; without it rows are plain text with end_of_text in between. `documents` are given either way.
    whole: the tokens past the last full sample are one too, filled up without labels.
    Raises UserError when the spans hold fewer than S + 1 tokens.
    """

    def __init__(
        self, tokens: Any, spans: Spans, context: int, document_mask: bool = False, *, whole: bool = False
    ) -> None:
        self.whole = whole
        self._tokens = tokens
        self.context = context
        self.document_mask = document_mask
        # Where each document ends in the stream.
        self._ends = spans.lengths.cumsum()
        # Documents that are neighbours in the file are read at once: a run, of which there are few.
        first = np.concatenate([[True], spans.begins[1:] != spans.ends[:-1]])
        last = np.concatenate([first[1:], [True]])
        self._run_begins = spans.begins[first]
        self._run_stream_ends = self._ends[last]
        self._run_stream_begins = np.concatenate([[0], self._run_stream_ends[:-1]])
        self.tokens = int(self._ends[-1]) if len(self._ends) else 0
        if self.tokens < (2 if whole else context + 1):
            raise UserError(
                f"{self.tokens:,} tokens are fewer than the {context + 1:,} of one sample with context={context}. "
                "Use a shorter context, or more text."
            )

    def __len__(self) -> int:
        """The samples of an epoch."""
        return -(-(self.tokens - 1) // self.context) if self.whole else (self.tokens - 1) // self.context

    def __getitem__(self, samples: Sequence[int]) -> Batch:
        """The Batch of these samples, in this order. Raises IndexError for one that does not exist."""
        size = self.context
        window = np.zeros((len(samples), size + 1), dtype=np.int64)
        ends, lengths = [], []
        for row, sample in enumerate(samples):
            if not 0 <= sample < len(self):
                raise IndexError(f"sample {sample} of {len(self)}")
            begin = sample * size
            lengths.append(min(size, self.tokens - 1 - begin))
            self._read(begin, window[row, : lengths[-1] + 1])
            ends.append(self._document_ends(begin))
        batch = packed_batch(window, ends, self.document_mask)
        if self.whole:
            batch["labels"][torch.arange(size) >= torch.tensor(lengths)[:, None]] = IGNORED_LABEL
        return batch

    def _document_ends(self, begin: int) -> np.ndarray:
        """Where documents end in the row that begins here in the stream: columns 1 to S."""
        first, last = np.searchsorted(self._ends, (begin, begin + self.context), side="right")
        return self._ends[first:last] - begin

    def _read(self, begin: int, out: np.ndarray) -> None:
        """Copy the stream's tokens from `begin` on into out."""
        run = int(np.searchsorted(self._run_stream_ends, begin, side="right"))
        filled = 0
        while filled < len(out):
            into_run = begin + filled - int(self._run_stream_begins[run])
            count = min(len(out) - filled, int(self._run_stream_ends[run]) - begin - filled)
            where = int(self._run_begins[run]) + into_run
            out[filled : filled + count] = self._tokens[where : where + count]
            filled += count
            run += 1


def packed_batch(window: np.ndarray, ends: Sequence[np.ndarray], document_mask: bool) -> Batch:
    """The Batch of rows of tokens. window: (B, S + 1) int64. ends: of each row, the columns, 1 to S, that follow a
    document's last token."""
    size = window.shape[1] - 1
    # A document's first token is marked in its row: a running sum then numbers the documents, and a running
    # maximum of the marked columns says where each began.
    begun = np.zeros((len(window), size), dtype=np.int32)
    for row, crossed in enumerate(ends):
        begun[row, crossed[crossed < size]] = 1
    labels = window[:, 1:].copy()
    columns = np.arange(size, dtype=np.int32)
    positions = np.tile(columns, (len(window), 1))
    if document_mask:
        positions -= np.maximum.accumulate(begun * columns, axis=1)
        for row, crossed in enumerate(ends):
            labels[row, crossed - 1] = IGNORED_LABEL
    return Batch(
        tokens=torch.from_numpy(window[:, :-1].copy()),
        labels=torch.from_numpy(labels),
        documents=torch.from_numpy(begun.cumsum(axis=1, dtype=np.int32)),
        positions=torch.from_numpy(positions),
    )
