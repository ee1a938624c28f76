"""Read JSON with errors that name the file or place that was read, unlike the errors of `json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError


def parse_json(text: str | bytes, where: str) -> Any:
    """Parse a JSON text. Raises a UserError that begins with `where` if the text is not JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON: {error}.") from error


def read_json(path: str | Path) -> Any:
    """Read a JSON file. Raises UserError if it is not JSON, OSError if it cannot be read."""
    return parse_json(Path(path).read_bytes(), str(path))
