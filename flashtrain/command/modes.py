"""Runs the modes that make no run folder: plan, with the script of a SLURM job that runs what is
planned, and those that work on a trained model, such as evaluate."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.files.shipped import conf_folder
from flashtrain.mode import working_mode
from flashtrain.run.machine import adapt_to_machine
from flashtrain.settings import command_line
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.settings import Settings
from flashtrain.spec import task_of
from flashtrain.training.hardware import Hardware

_OF_PLAN = ("mode", "hardware.plan_for")  # settings of a plan that its job does not have


def plan(settings: Settings, line: CommandLine) -> str:
    """Return the text of mode=plan: what the command would do on this machine. Nothing is started.
    Raises UserError for settings that cannot be run."""
    settings, hardware = adapt_to_machine(settings, line)
    planned = working_mode(settings)
    # A study whose command names one context plans the training of that one.
    if planned is None or (planned.study and "context" in line.by_name):
        return task_of(settings).plan(settings, hardware)
    return planned.plan(settings, hardware)


def write_job(settings: Settings, line: CommandLine, plan: str) -> str:
    """Write RECIPE.sbatch, with the line's words and half as much time again as the `plan` has (a
    day, if it has none), and return a line on it. Raises UserError if there is such a file."""
    hours = 1.5 * getattr(plan, "seconds", 0) / 3600
    left = [one.input_line for name, one in line.by_name.items() if name not in _OF_PLAN]
    words = [*left, *(() if "resume" in line.by_name else ("resume=auto",))]
    script = (conf_folder() / "job.sbatch").read_text(encoding="utf-8")
    path = Path(f"{settings.recipe}.sbatch")
    text = script.format(
        trainer=settings.trainer,
        hours=math.ceil(hours) or 24,
        folder=shlex.quote(str(Path.cwd())),
        environment=shlex.quote(str(Path(sys.executable).parent)),
        command=f"{command_line.program} {shlex.join(words)}",
    )
    if path.exists():
        raise UserError(f"{path} is there already, and is not replaced. Move it or remove it.")
    path.write_text(text, encoding="utf-8")
    return f"wrote {path}: sbatch {path}"


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
