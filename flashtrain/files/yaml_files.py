"""Read YAML files of settings as OmegaConf does, except that `${...}` is plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader


def read_yaml(path: str | Path) -> Any:
    """Return the plain values of a YAML file: 1e-4 is a number, a date is text. Raises
    OSError and yaml.YAMLError."""
    # OmegaConf.load would resolve `${oc.env:KEY}` when a value is used, which may show a secret.
    # yaml's errors have the name of an open file.
    with Path(path).open(encoding="utf-8-sig") as file:
        return yaml.load(file, Loader=get_yaml_loader())  # a SafeLoader's subclass


def literal(value: Any) -> Any:
    """Return plain values with their texts escaped, so that OmegaConf finds no interpolation in
    them and returns them unchanged."""
    if isinstance(value, dict):
        return {key: literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [literal(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", value)
    return value
