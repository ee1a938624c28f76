"""mode=plan --slurm: write the script of a SLURM job that runs what is planned."""

from __future__ import annotations

import math
import re
import shlex
import sys
from pathlib import Path

from flashtrain.files.shipped import conf_folder
from flashtrain.settings import command_line
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.settings import Settings

_TIME = re.compile(r"^time: .*?about ([\d.]+) (s|min|h),", re.MULTILINE)  # as plan_text writes it
_OF_PLAN = ("mode", "hardware.plan_for")
_HOURS = {"s": 1 / 3600, "min": 1 / 60, "h": 1}


def write_job(settings: Settings, line: CommandLine, plan: str) -> str:
    """Write RECIPE.sbatch, with the line's words and half as much time again as the `plan` says (a
    day, if it has none), and return a line on it. A file of that name is not replaced."""
    hours = 1.5 * sum(float(number) * _HOURS[unit] for number, unit in _TIME.findall(plan))
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
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    return f"wrote {path}: sbatch {path}"
