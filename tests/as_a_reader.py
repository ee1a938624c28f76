"""Commands as a reader types them, in a fork of this process, and what none of them may
do. Jobs are forks, too."""

from __future__ import annotations

import collections
import gc
import importlib.util
import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import cache


def succeeds(
    words: Sequence[str], environment: Mapping[str, str] = {}, *, several: bool = False
) -> str:
    """What the command printed: it ended with status 0, without a traceback,
    and said no line twice.

    several: it runs several trainings, each of which says its lines.
    """
    status, output = run(words, environment)
    told = f"{shlex.join(words)}\n{output}"
    assert status == 0, told
    assert "Traceback" not in output, told
    lines = collections.Counter(line for line in output.splitlines() if len(line.strip()) > 40)
    assert several or max(lines.values(), default=0) <= 1, told
    return output


@cache
def import_what_commands_need() -> None:
    """What every fork would import again: of a command of a second or two a quarter is this."""
    import wandb  # noqa: F401

    import flashtrain.command.modes
    import flashtrain.command.sweep
    import flashtrain.report.page
    import flashtrain.tasks.fine_tuning.evaluate
    import flashtrain.tasks.language.evaluate
    import flashtrain.tasks.masked_language.evaluate  # noqa: F401
    from flashtrain.command.request import settings_of

    settings_of(["recipe=gpt2"])  # Hydra's plugins, and all settings that are registered


def job(_: object, words: Sequence[str]) -> int:
    """In the place of JobProcesses.run: a fork of the command, which prints what it printed."""
    status, output = run(words, {})
    print(output)
    return status


def run(words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """`python -m flashtrain` with these words: in a fork of this process, which has
    imported what takes seconds."""
    import_what_commands_need()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        # What this process inherits may wait for threads that it has not, where it is collected.
        gc.freeze()
        os.close(read)
        for stream in (1, 2):
            os.dup2(write, stream)
        sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        logging.getLogger().handlers.clear()  # pytest's: lines are to be printed
        os.environ.update(environment)
        sys.argv = ["flashtrain", *words]
        # How jobs are started.
        sys.modules["__main__"].__spec__ = importlib.util.find_spec("flashtrain.__main__")
        status = 70
        try:
            from flashtrain.__main__ import main
            from flashtrain.run.job_process import JobProcesses

            JobProcesses.run = job
            main()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:  # noqa: BLE001 - told, and the fork ends
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.close(write)
    with os.fdopen(read, encoding="utf-8", errors="replace") as output:
        text = output.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text
