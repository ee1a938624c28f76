"""Runs mode=evaluate, generate, export and others on a run folder or a checkpoint."""

from __future__ import annotations

from typing import Any

from flashtrain.announce import quieten
from flashtrain.command.job import settle
from flashtrain.settings.settings import Settings
from flashtrain.spec import task_of
from flashtrain.training.hardware import Hardware


def run_mode(settings: Settings) -> int:
    """Run a mode that uses a checkpoint, print generated text, and return the command's exit status."""
    found = of_checkpoint(settings)
    if "text" in found:
        print(found["text"])
    return 0


def of_checkpoint(settings: Settings) -> dict[str, Any]:
    """Run a mode that uses a checkpoint, and return its results by name (see Task.run_mode)."""
    settings, hardware = on_this_machine(settings)
    return task_of(settings).run_mode(settings, hardware)


def on_this_machine(settings: Settings) -> tuple[Settings, Hardware]:
    """Adapt the settings of a mode that uses a trained model to this machine; return them and its hardware."""
    quieten()
    settings.hardware.demo = "never"  # the model is the one that was given, on whatever machine
    return settle(settings, ())
