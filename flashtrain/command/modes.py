"""Runs the modes that make no run folder: plan, and those that work on a trained
model, such as evaluate."""

from __future__ import annotations

from typing import Any

from flashtrain.mode import working_mode
from flashtrain.run.machine import adapt_to_machine
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.settings import Settings
from flashtrain.spec import task_of
from flashtrain.training.hardware import Hardware


def plan(settings: Settings, line: CommandLine) -> str:
    """Return the text of mode=plan: what the command would do on this machine. Nothing is started.
    Raises UserError for settings that cannot be run."""
    settings, hardware = adapt_to_machine(settings, line)
    planned = working_mode(settings)
    # A study whose command names one context plans the training of that one.
    if planned is None or (planned.study and "context" in line.by_name):
        return task_of(settings).plan(settings, hardware)
    return planned.plan(settings, hardware)


def run_mode(settings: Settings) -> int:
    """Run a mode that uses a checkpoint, print generated text, and return the
    command's exit status."""
    found = of_checkpoint(settings)
    if "text" in found:
        print(found["text"])
    return int(found.get("status", 0))


def of_checkpoint(settings: Settings) -> dict[str, Any]:
    """Run a mode that uses a checkpoint, and return its results by name (see Task.run_mode)."""
    settings, hardware = on_this_machine(settings)
    return task_of(settings).run_mode(settings, hardware)


def on_this_machine(settings: Settings) -> tuple[Settings, Hardware]:
    """Adapt the settings of a mode that uses a trained model to this machine; return
    them and its hardware."""
    settings.hardware.demo = "never"  # the model is the one that was given, on whatever machine
    return adapt_to_machine(settings, CommandLine())
