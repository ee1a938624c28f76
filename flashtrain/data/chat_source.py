"""Sources of conversations: rows of files and datasets, and the tokens that a chat
template makes of them.

A row is {"messages": [{"role": ..., "content": ...}, ...]}, with "tools" if the assistant has any,
or {"prompt": ..., "completion": ...}, or {"text": ...} (see chat_template.ChatTemplate), or of
ShareGPT's or Alpaca's format.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from flashtrain.data.chat_answers import Piece
from flashtrain.data.chat_template import ChatTemplate
from flashtrain.data.hub_source import HubSource
from flashtrain.data.sources import TextSource, held_out
from flashtrain.data.special_tokens import counted
from flashtrain.data.text_files import FilesSource, format_of
from flashtrain.data.token_cache import Encoded, grouped
from flashtrain.data.tokenizers import Tokenizer
from flashtrain.errors import UserError

log = logging.getLogger(__name__)

Broken = Callable[[UserError], None]


class ChatRows(TextSource, Protocol):
    """A TextSource that also yields its rows whole, such as conversations."""

    def rows(self, broken: Broken) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (place, row) for every row; the place is a text such as "chats.jsonl:12".

        Args:
            broken: Called with the error of each line that cannot be read, which is then skipped.
        """


class ChatFiles(FilesSource):
    """A FilesSource that yields the rows of its .jsonl (also compressed) and .parquet files."""

    expected = "conversations in .jsonl (also compressed) or .parquet files"

    def rows(self, broken: Broken) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield rows as ChatRows does. Raises UserError if there is no such file,
        or one cannot be read."""
        for file in self.files():
            for where, row in self.reader.rows(file, broken=broken):
                yield where, _without_nulls(row) if file.suffix == ".parquet" else row
        self._log_replaced()

    def _reads(self, file: Any) -> bool:
        return format_of(file) in (".jsonl", ".parquet")


class ChatDataset(HubSource):
    """A HubSource that yields the rows of its dataset."""

    def rows(self, broken: Broken) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield rows as ChatRows does."""
        for number, row in enumerate(self.table, start=1):
            yield f"{self.describe()}: row {number}", _without_nulls(row)


@dataclass
class ChatSource:
    """A TextSource of conversations that makes its own tokens, and marks those that get labels."""

    rows: ChatRows  # where the conversations come from
    template: ChatTemplate  # turns rows into tokens
    # Maximum share (0 to 1) of malformed rows, which are skipped and counted in a logged line.
    skip_broken: float = 0.0

    def held_out(self) -> ChatSource | None:
        """Return the conversations of the files that are named for validation;
        None if there are none."""
        rows = held_out(self.rows)
        return (
            None if rows is None else ChatSource(rows, self.template, skip_broken=self.skip_broken)
        )

    def describe(self) -> str:
        return self.rows.describe()

    def approximate_bytes(self) -> int | None:
        return self.rows.approximate_bytes()

    def fingerprint(self) -> str:
        parts = (self.rows.fingerprint(), self.template.key(), self.skip_broken)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def documents(self) -> Iterator[str]:
        raise UserError(
            "data=chat has no plain text to read: it holds conversations. "
            "Use data=files or data=hub."
        )

    def encoded(self, tokenizer: Tokenizer) -> Iterator[Encoded]:
        """Yield the encoded documents in groups. `tokenizer` is not used: the ChatTemplate has its
        own.

        Raises UserError, which names the first malformed row, if more rows are malformed than
        `skip_broken` allows.
        """
        pieces = counted(
            self._pieces(), self.template.tokenizer, lambda piece: piece.text if piece.plain else ""
        )
        for group in grouped(pieces, lambda piece: 2 * len(piece.text)):
            tokens, marks = zip(*self.template.encode(group), strict=True)
            yield Encoded(tokens, marks, sum(len(piece.text.encode()) for piece in group))

    def _pieces(self) -> Iterator[Piece]:
        """Yield the documents of all rows; then log a line on each kind of row that was changed or
        skipped."""
        broken: list[UserError] = []

        def refuse(error: UserError) -> None:
            if not self.skip_broken:
                raise error
            broken.append(error if not broken else UserError())

        whole, template = 0, self.template
        template.rewritten = template.endless = 0
        template.formats.clear()
        template.left_out.clear()
        for where, row in self.rows.rows(refuse):
            try:
                found = template.pieces(row)
            except UserError as error:
                refuse(UserError(f"{where}: {error}"))
                continue
            whole += 1
            yield from (piece for piece in found if piece.text)
        rows = whole + len(broken)
        if len(broken) > self.skip_broken * rows:
            raise UserError(
                f"{len(broken):,} of {rows:,} rows are broken, more than "
                f"data.skip_broken={self.skip_broken:g} allows. The first: {broken[0]}"
            )
        if broken:
            log.warning(
                "skipped %s of %s rows, which are broken. The first: %s",
                f"{len(broken):,}",
                rows,
                broken[0],
            )
        for line, number in template.formats.items():
            log.info("%s rows have %s", f"{number:,}", line)
        if lost := ", ".join(
            f"{name} ({count:,})" for name, count in template.left_out.most_common()
        ):
            log.warning("the chat template leaves out, of so many conversations: %s", lost)
        if template.rewritten:
            log.warning(
                "the chat template rewrites earlier turns, so %s conversations are split into one "
                "document per answer, with the prompt that the model sees for that answer",
                f"{template.rewritten:,}",
            )
        if template.endless:
            log.warning(
                "the model will not learn to stop: "
                "the chat template writes no special token after an answer (%s conversations)",
                f"{template.endless:,}",
            )


def _without_nulls(value: Any) -> Any:
    """Return the value without keys that are null: tables add these for keys of other rows, and
    templates test whether a key exists."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
