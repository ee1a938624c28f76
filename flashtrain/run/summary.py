"""The summary row of a run: flat, one value a key, the same keys whatever was trained."""

from __future__ import annotations

import time
from typing import Any

from flashtrain.settings.settings import Settings
from flashtrain.spec import mode_of, task_of
from flashtrain.training.hardware import Hardware, versions


def planned_row(settings: Settings, hardware: Hardware, overrides: list[str]) -> dict[str, Any]:
    """The part of the row that is known beforehand; a failed run's row is this with `status` and `error`."""
    common = {"attention": hardware.attention, "precision": hardware.precision}
    mode = mode_of(settings)
    trained = {} if mode is not None and mode.measures else {**task_of(settings).columns(settings), **common}
    return {
        "recipe": settings.recipe,
        "date": time.strftime("%Y-%m-%d"),
        **trained,
        "device": hardware.name,
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "overrides": " ".join(overrides),
    }


def failed_row(settings: Settings, hardware: Hardware, overrides: list[str], status: str, error: str) -> dict[str, Any]:
    """The row of a run that did not finish: `status` is FAILED, OUT_OF_MEMORY or STOPPED."""
    return {**planned_row(settings, hardware, overrides), "status": status, "error": error}
