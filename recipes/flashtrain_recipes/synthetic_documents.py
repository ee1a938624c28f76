"""Synthetic documents with cues for their labels anywhere in the text, and the best score
of reading only a part.

n tokens of a document, c tokens that are read, L labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np

from flashtrain.data.keyed_random import hashed, uniform
from flashtrain.data.labelled_documents import LabelledSamples
from flashtrain.data.wordpiece import SpecialTokens
from flashtrain.errors import UserError
from flashtrain.tasks.fine_tuning.settings import FineTuningSettings
from flashtrain.tasks.fine_tuning.splits import SPLITS, LabelledSource

COUNTS = {"train": 100_000, "validation": 500, "test": 2000}  # documents of each split
FILLER = 1024  # different filler tokens
_PRESENT, _PLACE, _FILLER = range(1, 4)  # keys that keep the three kinds of draws independent


def build_source(own: FineTuningSettings, context: int) -> LabelledSource:
    """Make a run's documents by the settings finetune.*, each split from its own seed,
    cut to `context` tokens."""
    documents = {
        name: SyntheticDocuments(
            getattr(own, name) or COUNTS[name], own.length, labels=own.labels, seed=number
        )
        for number, name in enumerate(SPLITS)
    }
    test = documents["test"]
    special = SpecialTokens.past(test.vocab_size)
    samples = {name: LabelledSamples(part, special, context) for name, part in documents.items()}
    bound = best_micro_f1(test.length, context - 2, test.presence)
    words = f"synthetic documents of {own.length:,} tokens"
    return LabelledSource(samples, test.label_names, special, None, words, bound)


@dataclass(eq=False)
class SyntheticDocuments:
    """Synthetic long documents (LabelledDocuments). Seed and i alone decide document i, which is
    made when it is read.

    Each label is present independently with the same probability. Each present label has one cue, a
    token of its own, at a uniformly random place; all other tokens are filler. A reader of the
    first c of n tokens sees the cue of a present label with probability c / n, and knows nothing
    else of labels without a visible cue: best_micro_f1 is the most that it can score, however it
    was trained. (This holds up to the order of L / n, as two cues never share a place.) Tokens 0 to
    L - 1 are the cues; the next FILLER ones are filler, the k-th with frequency 1 / k.

    Raises:
        UserError: There are more labels than tokens.
    """

    size: int  # number of documents
    length: int = 16384  # n
    labels: int = 8  # L
    presence: float = 0.2  # probability that a label is present
    seed: int = 0

    def __post_init__(self) -> None:
        if self.length < self.labels:
            raise UserError(
                f"finetune.length={self.length} with finetune.labels={self.labels}: expected at "
                "least as many tokens as labels."
            )
        self.label_names = tuple(f"cue {number}" for number in range(self.labels))
        self.vocab_size = self.labels + FILLER
        self._frequencies = np.cumsum(1 / np.arange(1, FILLER + 1))
        self._frequencies /= self._frequencies[-1]

    def __len__(self) -> int:
        return self.size

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each document, (size,) int64."""
        return np.full(self.size, self.length, dtype=np.int64)

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Make document `number`: its tokens, (n,) int64, and which labels are
        present, (L,) bool."""
        index = np.arange(self.labels)
        present = uniform(self.seed, _PRESENT, number, index) < self.presence
        draws = uniform(self.seed, _FILLER, number, np.arange(self.length))
        tokens = len(index) + np.searchsorted(self._frequencies, draws, side="right")
        places = self._places(number)
        tokens[places[present]] = index[present]
        return tokens, present

    def _places(self, number: int) -> np.ndarray:
        """Return the index of the token that is each label's cue in document `number`, (L,): random
        and different; labels that are absent have one, too, which is not used."""
        places: list[int] = []
        for label in range(self.labels):
            draws = (hashed(self.seed, _PLACE, number, label, again) for again in count())
            places.append(
                next(
                    place
                    for draw in draws
                    if (place := int(draw % np.uint64(self.length))) not in places
                )
            )
        return np.array(places)


def best_micro_f1(length: int, read: int, presence: float) -> float:
    """Return the highest expected micro-F1, over many documents, of reading the first
    `read` of `length` tokens.

    Let f = min(1, read / length) be the probability that a cue is read, and p the presence: the
    probability that a label is present. A label whose cue is seen is certain: p f of all labels.
    The others look alike: predicting none of them scores 2 f / (1 + f), predicting all scores 2 p /
    (1 + p), and predicting some lies between.
    """
    seen = min(1.0, read / length)
    return max(2 * seen / (1 + seen), 2 * presence / (1 + presence))
