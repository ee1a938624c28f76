"""mode=plan --slurm: write the script of a SLURM job that runs what is planned."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path

from flashtrain.errors import UserError
from flashtrain.files.shipped import conf_folder
from flashtrain.settings import command_line
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.settings import Settings

_OF_PLAN = ("mode", "hardware.plan_for")


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
