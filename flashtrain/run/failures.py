"""Print the command's line about an exception, and choose the exit status."""

from __future__ import annotations

import signal
import sys
import traceback

from flashtrain.errors import RunFailed, UserError, causes
from flashtrain.files.caches import default_cache_dir
from flashtrain.files.disk import write_atomically
from flashtrain.interruption import Interrupted, Stopped

CRASHED = 1
# Of a run; in the cache folder that of the latest command that failed without one.
LOG = "flashtrain.log"
NOTED = "flashtrain_log"  # attribute of an exception: the log file with its traceback
_MAX_MESSAGE = 500  # characters of a library's message


def say_failure(error: BaseException) -> int:
    """Print one line about the exception on standard error, and return the command's exit status.

    The status is 2 for a user's mistake, 3 if memory ran out, 128 + its number after a signal, and
    1 for anything else. A run that was stopped has printed its line, and has its own status: 0 if
    trainer.max_minutes are over.
    """
    if isinstance(error, Stopped):
        return error.status
    # Libraries raise others over it.
    interrupts = [one for one in causes(error) if isinstance(one, KeyboardInterrupt)]
    if interrupts:
        stop = (
            interrupts[0] if isinstance(interrupts[0], Interrupted) else Interrupted(signal.SIGINT)
        )
        return _say(str(stop), stop.status)
    if isinstance(error, SystemExit):
        raise error
    if isinstance(error, UserError | RunFailed):
        return _say(str(error), error.status)
    text = " ".join(str(error).split())[:_MAX_MESSAGE]
    return _say(
        f"{type(error).__name__}: {text}; details in {getattr(error, NOTED, None) or _log(error)}",
        CRASHED,
    )


def _say(line: str, status: int) -> int:
    print(f"flashtrain: {line}", file=sys.stderr, flush=True)
    return status


def _log(error: BaseException) -> str:
    traced = "".join(traceback.format_exception(error))
    try:
        return str(write_atomically(default_cache_dir() / LOG, traced))
    except OSError:
        print(traced, file=sys.stderr)
        return "the lines above"
