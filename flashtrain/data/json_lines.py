"""The lines of .jsonl files, compressed or not, for every reader of such files.

datasets 5.2 makes datetime objects of texts that look like dates, and names neither file nor line of what is no JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flashtrain.data.text_encodings import Decoder
from flashtrain.errors import UserError
from flashtrain.files.compressed_files import open_binary


def json_lines(
    path: Path, decoder: Decoder | None = None, broken: Callable[[UserError], None] | None = None
) -> Iterator[tuple[str, Any]]:
    """Of each line that is not blank: where it stands (FILE:LINE), and its value.

    decoder: of the file (None: UTF-8). broken: is called with the error of a line that is no JSON, which is passed
    over; None: that error is raised. Raises UserError, also for bytes that are no text, and what unpacking raises.
    """
    decoder = decoder or Decoder(path)
    with open_binary(path) as file:
        for number, line in enumerate(decoder.lines(file), start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                value = _value(line, where, decoder)
            except UserError as error:
                if broken is None:
                    raise
                broken(error)
                continue
            yield where, value


def _value(line: str, where: str, decoder: Decoder) -> Any:
    try:
        value = json.loads(line)
    except ValueError as error:
        # The parser counts lines of what it was given, which is one line.
        reason = f"{error.msg}: column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise UserError(f"{where}: not a JSON object on a line: {reason}.") from error
    return _without_halves(value, where, decoder) if "\\ud" in line.lower() else value


def _without_halves(value: Any, where: str, decoder: Decoder) -> Any:
    """The value, in which half a surrogate pair, which JSON can say and no text can hold, is refused or replaced."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if decoder.errors == "strict":
            raise UserError(
                f"{where}: half of a surrogate pair ({error.object[error.start]!a}), which is no character; "
                "data.encoding_errors=replace reads on."
            ) from error
        whole = text.encode(errors="replace")
        decoder.replaced += whole.count(b"?") - text.count("?")
        return json.loads(whole)
    return value
