"""YAML files of settings, read as OmegaConf reads them, but that `${...}` in them is text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader


def read_yaml(path: str | Path) -> Any:
    """What a YAML file holds, in plain values: 1e-4 is a number, a date is text. Raises OSError and yaml.YAMLError.

    OmegaConf.load would resolve `${oc.env:KEY}` where a value is used, and so put a secret into whatever shows it.
    """
    with Path(path).open(encoding="utf-8-sig") as file:  # of an open file yaml's errors say the name
        return yaml.load(file, Loader=get_yaml_loader())  # a SafeLoader's subclass


def literal(value: Any) -> Any:
    """The same plain values such that OmegaConf finds no interpolation in them: each text comes back as it is."""
    if isinstance(value, dict):
        return {key: literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [literal(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", value)
    return value
