"""Where conversations come from, and their tokens: files and datasets whose rows a chat template understands.

A row is {"messages": [{"role": ..., "content": ...}, ...]}, with "tools" where the assistant has any, {"prompt": ...,
"completion": ...} or {"text": ...} (chat_template.ChatTemplate says what becomes of each).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from flashtrain.data.chat_answers import Piece
from flashtrain.data.chat_template import ChatTemplate
from flashtrain.data.hub_source import HubSource
from flashtrain.data.sources import held_out
from flashtrain.data.text_files import FilesSource
from flashtrain.data.token_cache import GROUP_CHARACTERS, GROUP_DOCUMENTS, Encoded
from flashtrain.data.tokenizers import Tokenizer
from flashtrain.errors import UserError

log = logging.getLogger(__name__)


Broken = Callable[[UserError], None]


class ChatRows(Protocol):
    """Rows of conversations; the other methods are a TextSource's."""

    def describe(self) -> str: ...

    def fingerprint(self) -> str: ...

    def approximate_bytes(self) -> int | None: ...

    def rows(self, broken: Broken) -> Iterator[tuple[str, dict[str, Any]]]:
        """Where each row stands, in words, and the row. broken: is told of what is no row, which is passed over."""
        ...


class ChatFiles(FilesSource):
    """The .jsonl (compressed ones too) and .parquet files of a FilesSource, row by row."""

    def rows(self, broken: Broken) -> Iterator[tuple[str, dict[str, Any]]]:
        """See ChatRows. UserError: no such file, one that cannot be read."""
        files = [file for file in self.files() if {".parquet", ".jsonl"} & set(file.suffixes)]
        if not files:
            raise UserError(f"no conversations in {self.path}: expected .jsonl (also compressed) or .parquet files.")
        for file in files:
            for where, row in self.reader.rows(file, broken=broken):
                yield where, _without_nulls(row) if file.suffix == ".parquet" else row
        self._log_replaced()


class ChatDataset(HubSource):
    """A HubSource's rows."""

    def rows(self, broken: Broken) -> Iterator[tuple[str, dict[str, Any]]]:
        """See ChatRows."""
        for number, row in enumerate(self._load(), start=1):
            yield f"{self.describe()}: row {number}", _without_nulls(row)


class ChatSource:
    """A TextSource of conversations that makes its own tokens, with marks of what is learnt.

    skip_broken: the share of all rows that may be broken; they are left out, and counted in a line.
    """

    def __init__(self, rows: ChatRows, template: ChatTemplate, *, skip_broken: float = 0.0) -> None:
        self.rows = rows
        self.template = template
        self.skip_broken = skip_broken

    def held_out(self) -> ChatSource | None:
        """The conversations of files that are named for validation; None where none is."""
        rows = held_out(self.rows)
        return None if rows is None else ChatSource(rows, self.template, skip_broken=self.skip_broken)

    def describe(self) -> str:
        return self.rows.describe()

    def approximate_bytes(self) -> int | None:
        return self.rows.approximate_bytes()

    def fingerprint(self) -> str:
        parts = (self.rows.fingerprint(), self.template.key(), self.skip_broken)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def documents(self) -> Iterator[str]:
        raise UserError("conversations have no text without a chat template. Use data=files or data=hub.")

    def encoded(self, tokenizer: Tokenizer) -> Iterator[Encoded]:
        """See token_cache.Encoded. The tokenizer is the template's own.

        UserError: a broken row, or more of them than may be skipped; the first of them is named.
        """
        broken: list[UserError] = []

        def refuse(error: UserError) -> None:
            if not self.skip_broken:
                raise error
            broken.append(error if not broken else UserError())

        kept, before = 0, (self.template.rewritten, self.template.endless)
        group: list[Piece] = []
        characters = 0
        for where, row in self.rows.rows(refuse):
            try:
                found = self.template.pieces(row)
            except UserError as error:
                refuse(UserError(f"{where}: {error}"))
                continue
            kept += 1
            group += [piece for piece in found if piece.text]
            characters += sum(2 * len(piece.text) for piece in found)
            if characters >= GROUP_CHARACTERS or len(group) >= GROUP_DOCUMENTS:
                yield self._encoded(group)
                group, characters = [], 0
        if group:
            yield self._encoded(group)
        self._tell(kept + len(broken), broken, self.template.rewritten - before[0], self.template.endless - before[1])

    def _encoded(self, group: list[Piece]) -> Encoded:
        tokens, marks = zip(*self.template.encode(group), strict=True)
        return Encoded(tokens, marks, sum(len(piece.text.encode()) for piece in group))

    def _tell(self, rows: int, broken: list[UserError], rewritten: int, endless: int) -> None:
        if len(broken) > self.skip_broken * rows:
            raise UserError(
                f"{len(broken):,} of {rows:,} rows are broken, more than data.skip_broken={self.skip_broken:g} allows. "
                f"The first: {broken[0]}"
            )
        if broken:
            log.warning("skipped %s of %s rows, which are broken. The first: %s", f"{len(broken):,}", rows, broken[0])
        if rewritten:
            log.warning(
                "the chat template rewrites earlier turns, so %s conversations are split into one document per answer, "
                "with the prompt that the model sees for that answer",
                f"{rewritten:,}",
            )
        if endless:
            log.warning(
                "the model will not learn to stop: the chat template writes no special token after an answer (%s "
                "conversations)",
                f"{endless:,}",
            )


def _without_nulls(value: Any) -> Any:
    """Tables fill in null for what other rows have: templates ask whether a key is there at all."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
