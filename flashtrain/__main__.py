"""python -m flashtrain: compose the configuration, check it, run it; nothing else.

Whatever goes wrong ends with one line on the terminal: a mistake of the user's with exit status 2,
anything else with 1 and the place of its traceback.
"""

from __future__ import annotations

import time

# Before the heavy imports, so that a run's summary counts the whole command.
STARTED = time.monotonic()

from flashtrain.interruption import end_at_once, handle, interrupt, restore  # noqa: E402

if __name__ == "__main__":
    handle(end_at_once)  # Ctrl-C ends the imports below without a traceback

import contextlib  # noqa: E402
import faulthandler  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import shlex  # noqa: E402
import sys  # noqa: E402
from typing import NoReturn  # noqa: E402

import hydra  # noqa: E402
from hydra._internal.utils import get_args_parser  # noqa: E402

from flashtrain.command.compose import readable_errors, register_configs  # noqa: E402
from flashtrain.command.overrides import plain_words  # noqa: E402
from flashtrain.command.request import settings_of  # noqa: E402
from flashtrain.errors import UserError  # noqa: E402
from flashtrain.files.shipped import conf_folder  # noqa: E402
from flashtrain.run.failures import say_failure  # noqa: E402
from flashtrain.run.job_process import end_with_parent  # noqa: E402
from flashtrain.settings import command_line  # noqa: E402
from flashtrain.settings.command_line import FOLDER, CommandLine, quoted  # noqa: E402
from flashtrain.version import versions_text  # noqa: E402

# Lightning, and all that brings it in, takes seconds to import: functions below import what they
# need, so that help and mistakes are reported at once.


def main() -> None:
    """Run the command line, and exit with its status. A program that registers components of its
    own calls `main` to be the command with them."""
    end_with_parent()
    if __name__ != "__main__" and sys.argv[0].endswith(".py"):
        command_line.program = shlex.join(["python", sys.argv[0]])
    with contextlib.suppress(OSError, RuntimeError):  # standard error is no file, as in a notebook
        # Whatever ends this process in native code is reported with Python's own place in it.
        faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.raiseExceptions = False  # on a full disk every line of the log would be a traceback
    before = handle(end_at_once)
    try:
        sys.argv[1:] = plain_words(sys.argv[1:])
        status = _command(sys.argv[1:])
    except BaseException as error:  # noqa: BLE001 - whatever it is, a user reads one line about it
        status = say_failure(error)
    finally:
        restore(before)
    sys.exit(status)


def _command(words: list[str]) -> int:
    if "--version" in words:
        print(versions_text())
        return 0
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    parser.add_argument("--slurm", action="store_true")
    arguments = parser.parse_intermixed_args(words)  # people put flags anywhere
    if arguments.help or not words:
        from flashtrain.command.command_help import help_text

        print(help_text())
        return 0
    line = CommandLine(arguments.overrides)
    if arguments.cfg:
        sys.argv[1:] = [*(word for word in words if word not in line), *line]
        return _show(line)
    for key in sorted(line.by_name):
        if key.startswith("hydra") and key != FOLDER:
            raise UserError(
                f"{key} is a setting of Hydra's, of which only {FOLDER}=FOLDER can be given here. "
                f"Remove {key}."
            )
    planned = "mode=plan" in line and "hardware.plan_for" in line.by_name
    if arguments.slurm and (arguments.multirun or not planned):
        raise UserError("--slurm needs mode=plan and hardware.plan_for=GPU, such as h100; no -m.")
    if arguments.multirun:
        from flashtrain.command.sweep import run_sweep

        return run_sweep(line)
    settings = settings_of(line)
    from flashtrain.command import modes
    from flashtrain.interruption import ended_by_second_interrupt
    from flashtrain.mode import is_of_checkpoint, mode_of

    if settings.mode == "plan":
        print(text := modes.plan(settings, line))
        if arguments.slurm:
            from flashtrain.command.slurm import write_job

            print(write_job(settings, line, text))
        return 0
    mode = mode_of(settings)
    if mode is not None and mode.study:
        return mode.run_study(settings, line, started=STARTED)
    # Which leave something to clean up.
    if not is_of_checkpoint(settings.mode) or settings.mode == "export":
        handle(interrupt)
    with ended_by_second_interrupt():
        if is_of_checkpoint(settings.mode):
            return modes.run_mode(settings)
        from flashtrain.run.job import Job

        job = Job.of(settings, line)
        if FOLDER not in line.by_name:  # for the ranks that Lightning starts with the same words
            sys.argv.append(f"{FOLDER}={quoted(str(job.folder))}")
        job.run(started=STARTED)
    return 0


def _refuse(message: str) -> NoReturn:
    raise UserError(
        f"{message}. Usage: python -m flashtrain recipe=NAME [setting=value ...] [-m | --cfg job]"
    )


def _show(line: CommandLine) -> int:
    """Print the composed configuration by Hydra (--cfg job), and return the exit status 0."""
    # What goes wrong in Hydra itself is raised, and reported by main().
    os.environ["HYDRA_FULL_ERROR"] = "1"
    task = register_configs(line)
    with readable_errors(task):
        hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name=task)(
            lambda _: None
        )()
    return 0


if __name__ == "__main__":
    main()
