"""The files of a saved tokenizer, read by the Hugging Face `tokenizers` library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from flashtrain.errors import UserError, first_line

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
MARK = "flashtrain"  # in CONFIG: {"kind": ...}, what the tokenizer is to flashtrain


def read_tokenizer(path: Path, read: Callable[[str], Any] = Tokenizer.from_file) -> Any:
    """What `read` makes of a file. Raises UserError, naming the file, which the library's errors do not."""
    try:
        return read(str(path))
    except Exception as error:  # the library raises no other
        raise UserError(f"the tokenizer {path} cannot be read: {first_line(error)}.") from error
