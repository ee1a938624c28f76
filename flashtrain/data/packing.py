"""Pack text: documents lie end to end and are cut into rows of one length, without padding.

B batch (rows of the micro-batch on this device), S sequence (the context length in tokens).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flashtrain.data.keyed_random import uniform
from flashtrain.errors import UserError
from flashtrain_kernels.loss_head import IGNORED

log = logging.getLogger(__name__)

LengthWeights = Sequence[tuple[int, float]]  # (tokens of a document at least, its weight)


class Batch(TypedDict):
    """Packed rows of text, without padding. All fields are (B, S)."""

    tokens: Tensor  # int64
    labels: Tensor  # int64, the token that follows each position, -100 if there is none to learn
    # int32, number of the document within its row, from 0, non-decreasing along S.
    documents: Tensor
    # int32, 0 to S-1; with a document mask, they restart at each document's first token in the row.
    positions: Tensor


class ChatBatch(Batch):
    """A Batch of conversations: labels are -100 except on the tokens to learn."""

    # Factor for the micro-batch's mean loss, with which the mean over a step's micro-batches and
    # devices is the mean over all labels of the step: a plain mean of means would give more weight
    # to labels of a micro-batch that has few.
    weight: float
    label_count: int  # labels in the micro-batch's mean


class Spans(NamedTuple):
    """Documents, or parts of documents, as ranges [begins, ends) of the token file. Both arrays are
    (documents,) int64, in file order."""

    begins: np.ndarray
    ends: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """(documents,) int64, the number of tokens of each document."""
        return self.ends - self.begins

    @property
    def tokens(self) -> int:
        """The number of tokens of all documents."""
        return int(self.lengths.sum())

    def repeated(self, weights: LengthWeights, seed: int, context: int = 0) -> Spans:
        """Return the documents as often as an epoch reads them, by their lengths (Fu et al. 2024,
        "Data Engineering for Scaling Language Models to 128K Context").

        A document has the weight of the longest limit that it reaches, else 1. With 2.5 it is read
        twice or three times, drawn by the seed and its place in the file alone; with 0 never. All
        come once, then those that are read again: the copies of a document are far apart. Raises
        UserError if the weights leave fewer than a sample's `context` + 1 tokens.
        """
        weight = np.ones(len(self.begins))
        for at_least, own in sorted(weights):
            weight[self.lengths >= at_least] = own
        counts = np.floor(weight).astype(np.int64) + (uniform(seed, self.begins) < weight % 1)
        rounds = [np.flatnonzero(counts > done) for done in range(counts.max(initial=0))]
        order = np.concatenate([np.arange(0), *rounds])
        made = Spans(self.begins[order], self.ends[order])
        if made.tokens <= context < self.tokens:
            given = ", ".join("{{at_least:{},weight:{:g}}}".format(*one) for one in weights)
            raise UserError(
                f"data.length_weights=[{given}] leave {made.tokens:,} of {self.tokens:,} tokens to "
                f"train on: expected at least {context + 1:,}. Documents have "
                f"{self.lengths.min():,} to {self.lengths.max():,} tokens."
            )
        return made


class Split(NamedTuple):
    """The documents for training and those held out; `validation` is None if no
    documents are held out."""

    training: Spans
    validation: Spans | None


def split_documents(offsets: np.ndarray, *, fraction: float, context: int) -> Split:
    """Hold out about `fraction` of the documents, drawn at random; no document is on both sides.

    Both sides get at least one sample (S + 1 tokens) if the corpus is long enough. At least one
    document is held out, and more if they are short. A document of more than twice the share (which
    would turn 1% into half of a corpus of few documents) is held out only if there is no other
    choice, the shortest sufficient one first. If no whole document can be held out, as in a corpus
    of one document, the last tokens of the longest document are held out; if there are too few,
    nothing is. In both cases a line is logged. The split follows from the arguments alone.

    Args:
        offsets: (documents + 1,) int64: the first token of each document, then the number of
            tokens.
        fraction: Share of the documents to hold out; 0 holds out nothing, 1 all.
        context: S, the tokens of a sample.

    Raises:
        UserError: The corpus is shorter than one sample.
    """
    begins, ends = np.asarray(offsets[:-1]), np.asarray(offsets[1:])
    lengths = ends - begins
    total, sample = int(lengths.sum()), context + 1
    if total < sample and fraction != 1:
        raise UserError(
            f"the corpus has {total:,} tokens, fewer than the {sample:,} of one sample with "
            f"context={context}. Use "
            f"{f'a context of at most {total - 1}, or ' if total > 16 else ''}more text."
        )
    if fraction in (0, 1):
        whole, nothing = Spans(begins, ends), Spans(begins[:0], ends[:0])
        return Split(nothing, whole) if fraction else Split(whole, None)
    chosen = _held_out(lengths, fraction, sample)
    if chosen is not None:
        mask = np.zeros(len(lengths), dtype=bool)
        mask[chosen] = True
        return Split(Spans(begins[~mask], ends[~mask]), Spans(begins[mask], ends[mask]))
    longest = int(lengths.argmax())
    tail = max(sample, round(fraction * total))
    if lengths[longest] > tail and total - tail >= sample:
        log.warning(
            (
                "no whole document can be held out: "
                "the last %s tokens of the longest one are used for validation"
            ),
            f"{tail:,}",
        )
        cut = int(ends[longest]) - tail
        training_ends = ends.copy()
        training_ends[longest] = cut
        return Split(
            Spans(begins, training_ends), Spans(np.array([cut]), ends[longest : longest + 1])
        )
    log.warning(
        "the corpus of %s tokens is too small to hold out some for validation with context=%s",
        f"{total:,}",
        context,
    )
    return Split(Spans(begins, ends), None)


def _held_out(lengths: np.ndarray, fraction: float, sample: int) -> np.ndarray | None:
    """Return the indices of the documents to hold out; None if no choice leaves a sample on both
    sides."""
    total = int(lengths.sum())
    wanted = max(1, min(round(fraction * len(lengths)), len(lengths) - 1))
    # RandomState's stream is frozen: the split stays the same under every version of numpy.
    order = np.random.RandomState(0).permutation(len(lengths))
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


def _leaves_enough(total: int, taken: int, fraction: float, sample: int) -> bool:
    return total - taken >= max(sample, 0.5 * (1 - fraction) * total)


@dataclass(eq=False)
class PackedSamples(Dataset[Batch]):
    """A Dataset of packed text: indexed by a sequence of sample numbers, it returns a
    Batch of as many rows.

    The documents of the split, in order, are one stream of tokens, which is never copied. Sample n
    reads stream[n*S : n*S + S + 1]: its first S tokens are the input, its last S the labels, so
    that every token of the stream is a label once an epoch. Raises UserError if the spans hold
    fewer than S + 1 tokens.
    """

    file: Any  # the token file, of which slices are read (token_cache.MappedTokens)
    spans: InitVar[Spans]  # the split's documents in it
    context: int  # S
    # Positions restart at each document, and the label that would be the next document's first
    # token is -100. Without the mask, rows are plain text with end_of_text in between. Batches have
    # `documents` either way.
    document_mask: bool = False
    # Whether the tokens after the last full sample are a sample too, padded without labels.
    whole: bool = False

    def __post_init__(self, spans: Spans) -> None:
        self.tokens = spans.tokens
        if self.tokens < (2 if self.whole else self.context + 1):
            raise UserError(
                f"{self.tokens:,} tokens are fewer than the {self.context + 1:,} of one sample "
                f"with context={self.context}. Use a shorter context, or more text."
            )
        # Where each document ends in the stream.
        self._ends = spans.lengths.cumsum()
        # Documents that are neighbors in the file form a run, which is read at
        # once: there are few runs.
        first = np.concatenate([[True], spans.begins[1:] != spans.ends[:-1]])
        last = np.concatenate([first[1:], [True]])
        self._run_begins = spans.begins[first]
        self._run_stream_ends = self._ends[last]
        self._run_stream_begins = np.concatenate([[0], self._run_stream_ends[:-1]])

    def __len__(self) -> int:
        """The number of samples in an epoch."""
        if self.whole:
            return -(-(self.tokens - 1) // self.context)
        return (self.tokens - 1) // self.context

    def __getitem__(self, samples: Sequence[int]) -> Batch:
        """Return the Batch of these samples, in this order."""
        size = self.context
        window = np.zeros((len(samples), size + 1), dtype=np.int64)
        ends, lengths = [], []
        for row, sample in enumerate(samples):
            begin = sample * size
            lengths.append(min(size, self.tokens - 1 - begin))
            self._read(begin, window[row, : lengths[-1] + 1])
            first, last = np.searchsorted(self._ends, (begin, begin + size), side="right")
            ends.append(self._ends[first:last] - begin)
        batch = packed_batch(window, ends, self.document_mask)
        if self.whole:
            batch["labels"][torch.arange(size) >= torch.tensor(lengths)[:, None]] = IGNORED
        return batch

    def _read(self, begin: int, out: np.ndarray) -> None:
        run = int(np.searchsorted(self._run_stream_ends, begin, side="right"))
        filled = 0
        while filled < len(out):
            into_run = begin + filled - int(self._run_stream_begins[run])
            count = min(len(out) - filled, int(self._run_stream_ends[run]) - begin - filled)
            where = int(self._run_begins[run]) + into_run
            out[filled : filled + count] = self.file[where : where + count]
            filled += count
            run += 1


def packed_batch(window: np.ndarray, ends: Sequence[np.ndarray], document_mask: bool) -> Batch:
    """Make a Batch of rows of tokens, with their labels, document numbers and positions.

    Args:
        window: (B, S + 1) int64, the rows, each with the token that follows it.
        ends: For each row the column numbers, 1 to S, directly after a document's last token.
        document_mask: See PackedSamples.
    """
    size = window.shape[1] - 1
    # Each document's first token is marked in its row: the running sum of the marks numbers the
    # documents, and the running maximum of the marked columns is where each document began.
    begun = np.zeros((len(window), size), dtype=np.int32)
    for row, crossed in enumerate(ends):
        begun[row, crossed[crossed < size]] = 1
    labels = window[:, 1:].copy()
    columns = np.arange(size, dtype=np.int32)
    positions = np.tile(columns, (len(window), 1))
    if document_mask:
        positions -= np.maximum.accumulate(begun * columns, axis=1)
        for row, crossed in enumerate(ends):
            labels[row, crossed - 1] = IGNORED
    return Batch(
        tokens=torch.from_numpy(window[:, :-1].copy()),
        labels=torch.from_numpy(labels),
        documents=torch.from_numpy(begun.cumsum(axis=1, dtype=np.int32)),
        positions=torch.from_numpy(positions),
    )
