"""A job as the command runs it once its folder is named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flashtrain.run.failures import say_failure
from flashtrain.run.job import Job
from flashtrain.run.machine import adapt_to_machine
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.settings import Settings


def run_job(settings: Settings, folder: Path, *, overrides: Sequence[str], started: float) -> int:
    """Run the composed settings in `folder`, and return the exit status."""
    line = CommandLine.of(overrides)
    try:
        Job(*adapt_to_machine(settings, line), folder, line).run(started=started)
    except BaseException as error:  # noqa: BLE001 - as main() does
        return say_failure(error)
    return 0
