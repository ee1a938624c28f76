"""Sources of conversations: rows of files and datasets that a chat template turns into tokens.

A row is {"messages": [{"role": ..., "content": ...}, ...]}, with "tools" if the assistant has any, or {"prompt": ...,
"completion": ...}, or {"text": ...} (see chat_template.ChatTemplate).
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
        """Each row with its place as text. broken: called with the error of a line that is skipped."""
        ...


class ChatFiles(FilesSource):
    """The .jsonl (compressed ones too) and .parquet files of a FilesSource, row by row."""

    def rows(self, broken: Broken) -> Iterator[tuple[str, dict[str, Any]]]:
        """See ChatRows. UserError: there is no such file, or one cannot be read."""
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
    """A TextSource of conversations that makes its own tokens, and marks those that get labels.

    skip_broken: maximum share of all rows that may be broken; broken rows are skipped, and a logged line counts them.
    """

    def __init__(self, rows: ChatRows, template: ChatTemplate, *, skip_broken: float = 0.0) -> None:
        self.rows = rows
        self.template = template
        self.skip_broken = skip_broken

    def held_out(self) -> ChatSource | None:
        """The conversations of the files that are named for validation; None if there are none."""
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
        """Groups of documents (token_cache.Encoded). The tokenizer is the template's own.

        UserError: a row is broken, or more rows than may be skipped; the message names the first.
        """
        broken: list[UserError] = []

        def refuse(error: UserError) -> None:
            if not self.skip_broken:
                raise error
            broken.append(error if not broken else UserError())

        whole, before = 0, (self.template.rewritten, self.template.endless)
        group: list[Piece] = []
        characters = 0
        for where, row in self.rows.rows(refuse):
            try:
                found = self.template.pieces(row)
            except UserError as error:
                refuse(UserError(f"{where}: {error}"))
                continue
            whole += 1
            group += [piece for piece in found if piece.text]
            characters += sum(2 * len(piece.text) for piece in found)
            if characters >= GROUP_CHARACTERS or len(group) >= GROUP_DOCUMENTS:
                yield self._encoded(group)
                group, characters = [], 0
        if group:
            yield self._encoded(group)
        self._log_counts(
            whole + len(broken), broken, self.template.rewritten - before[0], self.template.endless - before[1]
        )

    def _encoded(self, group: list[Piece]) -> Encoded:
        tokens, marks = zip(*self.template.encode(group), strict=True)
        return Encoded(tokens, marks, sum(len(piece.text.encode()) for piece in group))

    def _log_counts(self, rows: int, broken: list[UserError], rewritten: int, endless: int) -> None:
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
    """The value without nulls, which tables add for keys of other rows: templates test whether a key exists."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
