"""One line of a .jsonl file, for every reader of such files."""

from __future__ import annotations

import json
from typing import Any

from flashtrain.errors import UserError


def parsed_line(line: bytes, where: str) -> Any:
    """The value on a line. where: FILE:LINE. UserError: no JSON, or bytes that are not UTF-8.

    The parser's own place is left out: it counts lines of what it was given, which is one line.
    """
    try:
        return json.loads(line.rstrip(b"\r\n"))  # or an unclosed string is told as a control character in it
    except json.JSONDecodeError as error:
        words = error.msg.removesuffix(" at").removesuffix(" starting")  # where the place would follow
        raise UserError(f"{where}: not a JSON object on a line: {words}.") from error
    except ValueError as error:  # a UnicodeDecodeError
        raise UserError(f"{where}: not a JSON object on a line: {' '.join(str(error).split())}.") from error
