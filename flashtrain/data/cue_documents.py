"""Made-up documents with cues, and the most that a reader of a part of them can score.

n tokens of a document, c tokens that are read, L labels.
"""

from __future__ import annotations

import numpy as np

from flashtrain.data.keyed_random import hashed, uniform
from flashtrain.errors import UserError

FILLER = 1024  # different filler tokens
_LENGTH, _PRESENT, _PLACE, _FILLER = range(4)  # keeps the draws apart


class CueDocuments:
    """`count` long documents (a LabelledDocuments) whose labels only their whole text tells. Document i follows from
    (seed, i) alone, and is made when it is read.

    Each label is present in a document independently, with one probability. For each that is present one cue, a token
    of its own, stands at a uniformly random place; all other tokens are filler that says nothing. A reader of the first
    c of n tokens sees a present label's cue with probability c / n, and of labels without a visible cue it knows no
    more than that chance: best_micro_f1 is the most that it can score, however it was trained. (Up to the order of
    L / n: two cues never share a place, so to see one makes another a little less likely to be among what is read.)

    length: n, of the longest; shortest: lengths are uniform from this to `length` (None: all have `length`).
    labels: L. presence: the probability of each label. Tokens 0 to L - 1 are the cues, the FILLER next ones filler, the
    k-th of them about as frequent as 1 / k, as words are. vocab_size: tokens altogether.
    UserError: more labels than fit the shortest document.
    """

    def __init__(
        self,
        count: int,
        length: int = 16384,
        *,
        shortest: int | None = None,
        labels: int = 8,
        presence: float = 0.2,
        seed: int = 0,
    ) -> None:
        shortest = length if shortest is None else shortest
        if not labels <= shortest <= length:
            raise UserError(
                f"documents of {shortest} to {length} tokens with {labels} labels: expected a length of {labels} or "
                "more, and no shortest above it."
            )
        self.count = count
        self.length = length
        self.shortest = shortest
        self.presence = presence
        self.seed = seed
        self.label_names = tuple(f"cue {number}" for number in range(labels))
        self.vocab_size = labels + FILLER
        self._frequencies = np.cumsum(1 / np.arange(1, FILLER + 1))
        self._frequencies /= self._frequencies[-1]

    def __len__(self) -> int:
        return self.count

    @property
    def lengths(self) -> np.ndarray:
        """(count,) int64."""
        spread = np.uint64(self.length - self.shortest + 1)
        return self.shortest + (hashed(self.seed, _LENGTH, np.arange(self.count)) % spread).astype(np.int64)

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (n,) int64 and labels (L,) bool. Raises IndexError for one that does not exist."""
        if not 0 <= number < self.count:
            raise IndexError(f"document {number} of {self.count}")
        length = int(self.shortest + hashed(self.seed, _LENGTH, number) % np.uint64(self.length - self.shortest + 1))
        index = np.arange(len(self.label_names))
        present = uniform(self.seed, _PRESENT, number, index) < self.presence
        draws = uniform(self.seed, _FILLER, number, np.arange(length))
        tokens = len(index) + np.searchsorted(self._frequencies, draws, side="right")
        places = self._places(number, len(index), length)
        tokens[places[present]] = index[present]
        return tokens, present

    def _places(self, number: int, labels: int, length: int) -> np.ndarray:
        """(L,) different places, each uniform: drawn one by one, and again where a place is taken."""
        places: list[int] = []
        for label in range(labels):
            again = 0
            while True:
                place = int(hashed(self.seed, _PLACE, number, label, again) % np.uint64(length))
                if place not in places:
                    break
                again += 1
            places.append(place)
        return np.array(places)


def best_micro_f1(lengths: np.ndarray | int, read: int, presence: float) -> float:
    """The most micro-F1 that a reader of the first `read` tokens of such documents can expect, of very many of them.

    Let f = min(1, read / n) be the chance that a cue is among what is read, and p the presence. A label whose cue is
    seen is certain: p f of all labels. One that is not seen is present with probability p (1 - f) / (1 - p f), and all
    such labels of documents of one length look alike. F1 = 2 TP / (labels + predictions), a ratio of sums, is largest
    where all of the likelier ones are predicted, up to some length, and none of the rest; this tries every such choice.
    For documents of one length it is max(2 f / (1 + f), 2 p / (1 + p)).
    """
    sizes = np.atleast_1d(np.asarray(lengths, dtype=np.float64))
    seen = np.sort(np.minimum(1.0, read / sizes))  # the least seen come first: there an unseen label is likeliest
    certain = presence * seen.sum()
    guessed = np.concatenate(([0.0], (presence * (1 - seen)).cumsum()))
    guesses = np.concatenate(([0.0], (1 - presence * seen).cumsum()))
    scores = 2 * (certain + guessed) / (presence * len(sizes) + certain + guesses)
    return float(scores.max())
