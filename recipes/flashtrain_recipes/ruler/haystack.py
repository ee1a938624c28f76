"""The text in which RULER's needles are hidden, in pieces, and words to name things with."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import cycle, islice

from flashtrain.data.sources import StandardLibrarySource
from flashtrain.data.text_files import FilesSource
from flashtrain.data.tokenizers import first_bytes

_PIECE = re.compile(r"(?s).{1,300}?(?:[.!?]\s+|\n+|\Z)|.{300}")  # a sentence or line, if short
_BYTES = 4_000_000  # read of a text, whatever the lengths: its words are then the same for all
WORDS = 50_000  # a text of fewer different words gets made-up ones


class Haystack:
    """A text in pieces, and its different words, shuffled: no fewer than WORDS."""

    def __init__(self, text: str) -> None:
        self.pieces, draw = _PIECE.findall(text), random.Random(0)
        words = sorted(set(re.findall(r"\b[a-z]{4,10}\b", text)))
        draw.shuffle(words)
        self.words = words + [made_up(draw, 4) for _ in range(WORDS - len(words))]

    def read(self, draw: random.Random) -> Iterator[str]:
        """Yield pieces without end, from a drawn place on; the text's begin follows its end."""
        begin = draw.randrange(len(self.pieces))
        return islice(cycle(self.pieces), begin, None)


def read_haystack(path: str | None) -> Haystack:
    """Read the text of ruler.path; None: the standard library's code."""
    source = StandardLibrarySource(include_tests=False) if path is None else FilesSource(path)
    return Haystack("\n".join(first_bytes(source.documents(), _BYTES)))


def made_up(draw: random.Random, syllables: int) -> str:
    """Return a word of so many syllables, each of two letters."""
    return "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(syllables))
