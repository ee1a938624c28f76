"""Read JSON with errors that name what was read, which those of `json` do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError


def parse_json(text: str | bytes, where: str) -> Any:
    """The JSON value of a text. Raises UserError, beginning with `where`, for anything else."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON: {error}.") from error


def read_json(path: str | Path) -> Any:
    """The JSON value in a file. Raises UserError for anything else, OSError for a file that cannot be read."""
    return parse_json(Path(path).read_bytes(), str(path))
