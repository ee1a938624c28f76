"""Which part of a corpus is trained on, and which is held out to validate on."""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np

from flashtrain.errors import UserError

log = logging.getLogger(__name__)


class Spans(NamedTuple):
    """Documents, or a part of one, as ranges of the token file. Both arrays are (documents,) int64, in file order."""

    begins: np.ndarray
    ends: np.ndarray

    @property
    def tokens(self) -> int:
        return int((self.ends - self.begins).sum())


class Split(NamedTuple):
    """What is trained on and what is held out; `validation` is None when nothing is."""

    training: Spans
    validation: Spans | None


def split_documents(offsets: np.ndarray, *, fraction: float, context: int, seed: int = 0) -> Split:
    """Hold out about `fraction` of the documents, drawn at random, and no document on both sides.

    offsets: (documents + 1,) int64, as in a token cache. fraction: of the documents, in [0, 1); 0 holds out nothing.
    context: S, in tokens. Both sides get at least one sample's worth (S + 1 tokens) wherever the corpus has that.

    At least one document is held out, more when they are short. A document of more than twice the share (which would
    turn 1% into half of a corpus of few documents) is held out only if no other choice is left, the shortest
    sufficient one first. Where no whole document can be spared, as in a corpus of one, the last tokens of the longest
    document are held out instead, with one logged line; where not even those, nothing is, with one logged line.

    Deterministic in its arguments. Raises UserError when the corpus is shorter than one sample.
    """
    if not 0 <= fraction < 1:
        raise UserError(f"validation_fraction={fraction} must be at least 0 and below 1.")
    begins, ends = np.asarray(offsets[:-1]), np.asarray(offsets[1:])
    lengths = ends - begins
    total, sample = int(lengths.sum()), context + 1
    if total < sample:
        raise UserError(
            f"the corpus has {total:,} tokens, fewer than the {sample:,} of one sample with context={context}; "
            f"use {f'a context of at most {total - 1}, or ' if total > 16 else ''}more text."
        )
    if fraction == 0:
        return Split(Spans(begins, ends), None)
    held = _held_out(lengths, fraction, sample, seed)
    if held is not None:
        mask = np.zeros(len(lengths), dtype=bool)
        mask[held] = True
        return Split(Spans(begins[~mask], ends[~mask]), Spans(begins[mask], ends[mask]))
    longest = int(lengths.argmax())
    tail = max(sample, round(fraction * total))
    if lengths[longest] > tail and total - tail >= sample:
        log.warning("no whole document can be held out: validating on the last %s tokens of one", f"{tail:,}")
        cut = int(ends[longest]) - tail
        kept = ends.copy()
        kept[longest] = cut
        return Split(Spans(begins, kept), Spans(np.array([cut]), ends[longest : longest + 1]))
    log.warning("the corpus of %s tokens has none to spare for validation with context=%s", f"{total:,}", context)
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
