"""Made-up documents with cues, and the most that a reader of a part of them can score.

n tokens of a document, c tokens that are read, L labels.
"""

from __future__ import annotations

from itertools import count

import numpy as np

from flashtrain.data.keyed_random import hashed, uniform
from flashtrain.errors import UserError

FILLER = 1024  # different filler tokens
_PRESENT, _PLACE, _FILLER = range(1, 4)  # keeps the draws apart


class CueDocuments:
    """`size` long documents (a LabelledDocuments) whose labels only their whole text tells. Document i follows from
    (seed, i) alone, and is made when it is read.

    Each label is present in a document independently, with one probability. For each that is present one cue, a token
    of its own, stands at a uniformly random place; all other tokens are filler that says nothing. A reader of the first
    c of n tokens sees a present label's cue with probability c / n, and of labels without a visible cue it knows no
    more than that chance: best_micro_f1 is the most that it can score, however it was trained. (Up to the order of
    L / n: two cues never share a place, so to see one makes another a little less likely to be among what is read.)

    length: n. labels: L. presence: the probability of each label. Tokens 0 to L - 1 are the cues, the FILLER next ones
    filler, the k-th of them about as frequent as 1 / k, as words are. vocab_size: tokens altogether.
    UserError: more labels than tokens.
    """

    def __init__(
        self,
        size: int,
        length: int = 16384,
        *,
        labels: int = 8,
        presence: float = 0.2,
        seed: int = 0,
    ) -> None:
        if length < labels:
            raise UserError(f"length={length} with {labels} labels: expected a length of at least {labels} tokens.")
        self.size = size
        self.length = length
        self.presence = presence
        self.seed = seed
        self.label_names = tuple(f"cue {number}" for number in range(labels))
        self.vocab_size = labels + FILLER
        self._frequencies = np.cumsum(1 / np.arange(1, FILLER + 1))
        self._frequencies /= self._frequencies[-1]

    def __len__(self) -> int:
        return self.size

    @property
    def lengths(self) -> np.ndarray:
        """(size,) int64."""
        return np.full(self.size, self.length, dtype=np.int64)

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (n,) int64 and labels (L,) bool. Raises IndexError for one that does not exist."""
        if not 0 <= number < self.size:
            raise IndexError(f"document {number} of {self.size}")
        index = np.arange(len(self.label_names))
        present = uniform(self.seed, _PRESENT, number, index) < self.presence
        draws = uniform(self.seed, _FILLER, number, np.arange(self.length))
        tokens = len(index) + np.searchsorted(self._frequencies, draws, side="right")
        places = self._places(number)
        tokens[places[present]] = index[present]
        return tokens, present

    def _places(self, number: int) -> np.ndarray:
        """(L,) different places, each uniform: drawn one by one, and again where a place is taken."""
        places: list[int] = []
        for label in range(len(self.label_names)):
            draws = (hashed(self.seed, _PLACE, number, label, again) for again in count())
            places.append(next(place for draw in draws if (place := int(draw % np.uint64(self.length))) not in places))
        return np.array(places)


def best_micro_f1(length: int, read: int, presence: float) -> float:
    """The most micro-F1 that a reader of the first `read` tokens of such documents can expect, of very many of them.

    Let f = min(1, read / n) be the chance that a cue is among what is read, and p the presence. A label whose cue is
    seen is certain: p f of all labels. The others all look alike: to guess none of them scores 2 f / (1 + f), to guess
    all 2 p / (1 + p), and to guess some lies between.
    """
    seen = min(1.0, read / length)
    return max(2 * seen / (1 + seen), 2 * presence / (1 + presence))
