"""python -m flashtrain: compose the configuration, check it, run it; nothing else.

A mistake of the user's ends with one line on the terminal and exit status 2.
"""

from __future__ import annotations

import time

STARTED = time.time()  # before the heavy imports, so that a run's summary counts the whole command

import signal  # noqa: E402

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the imports below without a traceback; see main()

import logging  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import hydra  # noqa: E402
from hydra._internal.utils import get_args_parser  # noqa: E402
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from flashtrain.command.compose import (  # noqa: E402
    CONFIG_NAME,
    check_given_once,
    checked_settings,
    compose_settings,
    override_keys,
    parse_overrides,
    quoted,
    readable_errors,
    register_configs,
)
from flashtrain.command.given import check_all_heeded  # noqa: E402
from flashtrain.command.words import plain_words  # noqa: E402
from flashtrain.errors import UserError  # noqa: E402
from flashtrain.files.disk import conf_folder  # noqa: E402
from flashtrain.run.job_process import CtrlC, end_with_parent  # noqa: E402
from flashtrain.settings.settings import Settings  # noqa: E402

# Lightning, and all that brings it in, takes seconds to import: functions below import what they need, so that help and
# mistakes are told at once.


def main() -> None:
    """The command. A program of your own that registers components calls this to have the same command."""
    end_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.raiseExceptions = False  # on a full disk every line of the log would be a traceback
    interrupted = CtrlC()
    try:
        if sys.argv[1:2] == ["cache"]:
            from flashtrain.command.cache import run_cache

            status = run_cache(sys.argv[2:])
        else:
            sys.argv[1:] = plain_words(sys.argv[1:])
            status = _command(sys.argv[1:])
    except (Exception, KeyboardInterrupt) as error:
        # An import that is broken off fails in whatever way the library has.
        status, line = (130, "stopped by Ctrl-C") if interrupted else (2, _one_line(error))
        if line is None:
            raise
        print(f"flashtrain: {line}", file=sys.stderr)
    sys.exit(status)


def _one_line(error: BaseException) -> str | None:
    """What a user's mistake, or a disk that is full or cannot be written, is told as; None for anything else."""
    from flashtrain.files.disk import disk_line

    line = str(error) if isinstance(error, UserError) else disk_line(error)
    return None if line is None else str(UserError(line))


def _command(words: list[str]) -> int:
    # argparse wants its flags before the overrides; people put -m anywhere.
    words = sys.argv[1:] = sorted(words, key=lambda word: word not in ("-m", "--multirun"))
    arguments = get_args_parser().parse_args(words)
    if arguments.help or not words:
        from flashtrain.command.command_help import help_text

        print(help_text())
        return 0
    check_given_once(arguments.overrides)
    keys = override_keys(arguments.overrides)
    if arguments.multirun and not any(key.startswith(("hydra/launcher", "hydra/sweeper")) for key in keys):
        from flashtrain.command.sweep import run_sweep

        return run_sweep(arguments.overrides)
    if not arguments.multirun and not (arguments.cfg or arguments.info or arguments.hydra_help):
        composed = None if "mode" in keys else compose_settings(arguments.overrides)
        # One that is told its folder is a job of a sweep or a comparison, whose command was checked as a whole.
        is_job = "hydra.run.dir" in keys
        if composed is not None and not is_job:
            check_all_heeded(composed, arguments.overrides)
        from flashtrain.command import modes
        from flashtrain.command.job import plan
        from flashtrain.spec import mode_of

        settings = composed or modes.settings_from_checkpoint(arguments.overrides)
        settings = settings or compose_settings(arguments.overrides)
        if composed is None and not is_job:
            check_all_heeded(settings, arguments.overrides)
        if settings.mode == "plan":
            print(plan(settings, arguments.overrides))
            return 0
        mode = mode_of(settings)
        if mode is not None and mode.study:
            return mode.run_study(settings, arguments.overrides, started=STARTED)
        if settings.mode in modes.OF_A_CHECKPOINT or (mode is not None and mode.of_checkpoint):
            return modes.run_mode(settings)
        return _run(settings, arguments.overrides)
    register_configs()
    hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name=CONFIG_NAME)(_hydra_job)()
    return 0


def _run(settings: Settings, overrides: list[str]) -> int:
    """Run one job in its folder, which is taken before Hydra writes into it. A folder that nothing came into is
    removed. Raises UserError."""
    from flashtrain.folders.run_folder import remove_unused
    from flashtrain.folders.run_lock import hold, let_go

    if "hydra.run.dir" in override_keys(overrides):
        folder = _named_folder(overrides)
    else:
        folder = _run_folder(settings, overrides)
        sys.argv.append(f"hydra.run.dir={quoted(str(folder))}")
    try:
        if folder is not None:
            hold(folder)
        os.environ["HYDRA_FULL_ERROR"] = "1"  # what goes wrong in Hydra itself is raised, and told below
        with readable_errors():
            hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name=CONFIG_NAME)(_hydra_job)()
    finally:
        if folder is not None:
            let_go(folder)
            remove_unused(folder)
    return 0


def _hydra_job(config: DictConfig) -> None:
    from flashtrain.command.job import run_job

    composed = HydraConfig.get()
    folder = Path(composed.runtime.output_dir)
    status = run_job(checked_settings(config), folder, overrides=list(composed.overrides.task), started=STARTED)
    if status:
        sys.exit(status)


def _named_folder(overrides: list[str]) -> Path | None:
    """The folder that hydra.run.dir=... names; None where it is asked of other settings, which Hydra looks up."""
    values = [o.value() for o in parse_overrides(overrides) if o.get_key_element().lstrip("+") == "hydra.run.dir"]
    return Path(values[-1]) if values and isinstance(values[-1], str) and "${" not in values[-1] else None


def _run_folder(settings: Settings, overrides: list[str]) -> Path:
    """The folder of the run to continue, or a new one; made only once the settings are known to work here."""
    from flashtrain.command.job import settle
    from flashtrain.folders.run_folder import LAST, find_checkpoint, new_run_folder, unfinished_or_new
    from flashtrain.spec import task_of

    settings, _ = settle(settings, overrides, quiet=True)
    carried = task_of(settings).is_carried(str(settings.resume))
    if settings.resume not in (None, "auto") and not carried:
        return find_checkpoint(str(settings.resume), prefer=LAST, setting="resume")[0]
    parent = Path(settings.output) / settings.recipe
    return unfinished_or_new(parent, settings) if settings.resume == "auto" else new_run_folder(parent)


if __name__ == "__main__":
    main()
