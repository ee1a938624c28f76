"""Small files that anybody may have written (settings, JSON, vocabularies): read bounded, and never believed.

Every file of a run folder, a cache, a checkpoint folder or an export may come from elsewhere. So: a size is looked at
before a byte is read; YAML has no aliases (a few lines of them become gigabytes) and no interpolation (`${oc.env:KEY}`
would print a secret); depth is bounded; and whatever is wrong is one UserError that names the file. Checkpoints are
read by training/checkpoints.py, weights by integrations/safetensors_files.py.
"""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from flashtrain.errors import UserError

MIB = 2**20
SETTINGS_BYTES = MIB  # a config.yaml: ours have some 5 KB
JSON_BYTES = 64 * MIB  # tokenizer.json of the largest vocabularies is 33 MB
MOST_COUNTED = 2**53  # steps, samples, tokens: no run has so many, and such numbers are exact everywhere
DEEPEST = 100  # brackets within brackets


def read_bytes(path: str | Path, most: int) -> bytes:
    """The whole content of a regular file of at most `most` bytes. Raises UserError."""
    path = Path(path)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device may never end
            raise UserError(f"{path} is no file.")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}.") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read: {reason}.") from error
    if len(content) > most:
        raise UserError(f"{path} has {max(status.st_size, most + 1):,} bytes; at most {most:,} are read.")
    return content


def read_text(path: str | Path, most: int = JSON_BYTES) -> str:
    """As read_bytes, of UTF-8. Raises UserError."""
    try:
        return read_bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}.") from error


def parse_json(content: bytes | str, where: str) -> Any:
    """The JSON value in `content`. Raises UserError, beginning with `where`, for anything else, or too deep a one."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not valid JSON: {error.reason} at byte {error.start}.") from error
    except RecursionError as error:
        raise UserError(f"{where} is nested too deeply.") from error
    except ValueError as error:  # also a number of more digits than Python converts
        raise UserError(f"{where} is not valid JSON: {error}.") from error


def read_json(path: str | Path, most: int = JSON_BYTES) -> Any:
    """The JSON value in a file. Raises UserError."""
    return parse_json(read_bytes(path, most), str(path))


def read_json_object(path: str | Path, most: int = JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError, also for another kind of value."""
    content = read_json(path, most)
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not a JSON object.")
    return content


def read_yaml(path: str | Path, most: int = SETTINGS_BYTES) -> dict[str, Any]:
    """The mapping in a YAML file, in plain values; `${...}` in it is text (see `literal`). Raises UserError.

    Values are understood as OmegaConf understands them (1e-4 is a number). Aliases are refused.
    """
    text = read_text(path, most)
    try:
        content = yaml.load(text, Loader=_loader())  # a SafeLoader's subclass
    except RecursionError as error:
        raise UserError(f"{path} is nested deeper than {DEEPEST} levels.") from error
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:  # ValueError: a date of a 13th month
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no settings, one `name: value` a line.")
    return content


def literal(value: Any) -> Any:
    """The same plain values such that OmegaConf finds no interpolation in them: each text comes back as it is."""
    if isinstance(value, dict):
        return {key: literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [literal(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", value)
    return value


def is_count(value: Any) -> bool:
    """Whether the value is a whole number from 0 up, as steps, samples and tokens are counted."""
    return type(value) is int and 0 <= value < MOST_COUNTED


def _loader() -> type[yaml.SafeLoader]:
    class Loader(get_yaml_loader()):  # type: ignore[misc]
        """OmegaConf's loader without aliases, and of bounded depth."""

        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("aliases (*name) are not read")
            self.depth += 1
            if self.depth > DEEPEST:
                raise RecursionError
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    return Loader
