"""Special tokens that a text spells, such as <|im_end|>: read as letters or as tokens, and counted."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

log = logging.getLogger(__name__)


def tokenizer_for(source: Any, tokenizer: Any) -> Any:
    """Return the tokenizer for a source: special tokens that its texts spell are letters, or tokens if it says so."""
    return tokenizer.with_special_tokens() if getattr(source, "special_tokens", False) else tokenizer


class Spelled:
    """Counts the texts that spell special tokens of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        # One expression reads some 2 GB of text a second, a hundred times as fast as a tokenizer.
        self._any = re.compile("|".join(map(re.escape, getattr(tokenizer, "spellings", ()))) or "(?!)")
        self._counts, self._texts = Counter[str](), 0
        self._read = "letters" if getattr(tokenizer, "letters", True) else "tokens"

    def count(self, texts: Iterable[str]) -> None:
        """Count these texts too."""
        for found in filter(None, (set(self._any.findall(text)) for text in texts)):
            self._texts += 1
            self._counts.update(found)

    def report(self) -> None:
        """Log a line with the counts, if there are any."""
        if self._texts:
            listed = ", ".join(f"{token} in {number:,}" for token, number in self._counts.most_common())
            line = "%s texts spell special tokens, read as %s (data.special_tokens): %.300s"
            log.warning(line, f"{self._texts:,}", self._read, listed)
