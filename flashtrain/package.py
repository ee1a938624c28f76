"""What flashtrain's packages share: the version, and how their public names are imported when first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__version__ = "0.1.0"


def import_when_used(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's __getattr__ (PEP 562): a name is imported when it is first used. homes: name -> module in package."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
