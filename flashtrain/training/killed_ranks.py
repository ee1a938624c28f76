"""Report which rank was killed by a signal, for example by Linux when host memory runs out."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from lightning_fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from torch.distributed import DistError

from flashtrain.errors import RunFailed

_HOST = re.compile(r"\[([^\s\[\]]+)\]:\d+")  # gloo's "Connection closed by peer [10.0.0.2]:38734"


def name_killed_ranks(note: Callable[[str], None]) -> None:
    """From now on, print a line if a signal kills a rank, and end with RunFailed's status
    if any rank has failed.

    For the command, not for the library: it changes how Lightning ends a job. Ranks that end by
    themselves report their own error.

    Args:
        note: also called with the line; a later call of name_killed_ranks replaces it.
    """

    def end(observer: _ChildProcessObserver) -> None:
        killed = killed_rank(observer._child_processes, seconds=0)
        for rank in observer._child_processes:
            rank.kill()
        end_job(killed, note)

    # pytorch-lightning 2.6.6 starts a job's other ranks as child processes of the first one.
    # When one of them has died, it kills all others with SIGKILL, the first one too: whether
    # a failed collective ends that with a status of its own before, is a matter of seconds
    # and of the strategy.
    _ChildProcessObserver._terminate_all = end  # type: ignore[method-assign, assignment]


def end_job(line: str | None, note: Callable[[str], None] | None) -> NoReturn:
    """Print the line, if there is one, call `note` with it, and end this process at once,
    with RunFailed's status."""
    try:
        if line is not None:
            print(f"flashtrain: {line}. The job ends.", file=sys.stderr, flush=True)
            if note is not None:
                note(line)
    finally:
        os._exit(RunFailed.status)


def killed_rank(ranks: Sequence[subprocess.Popen[bytes]], seconds: float = 2.0) -> str | None:
    """Return a line that names the first of these ranks that was killed by a
    signal; None if none was.

    Args:
        ranks: the processes of rank 1, rank 2 and so on.
        seconds: how long to wait for their end: a failed collective raises an error before the exit
            status of the killed rank is known.
    """
    until = time.monotonic() + seconds
    while True:
        codes = [rank.poll() for rank in ranks]
        for number, code in enumerate(codes, 1):
            if code is not None and code < 0:
                name = f"signal {-code}"
                if -code in set(signal.Signals):
                    name = signal.Signals(-code).name
                hint = " (often: out of host memory)" if name == "SIGKILL" else ""
                return f"rank {number} was killed by {name}{hint}"
        if None not in codes or time.monotonic() > until:
            return None
        time.sleep(0.02)


def is_broken_connection(error: BaseException) -> bool:
    """Return whether a collective raised the error, as it does when a process of the job has ended
    or the network has failed."""
    # NCCL's errors have their own type, gloo's only a text.
    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError)
        and any(word in str(error) for word in ("gloo", "Gloo", "NCCL"))
    )


def lost_connection(error: BaseException) -> str | None:
    """Return a line on why this process could not reach, or lost, the other processes of its job;
    None if the error has another cause."""
    if "EADDRINUSE" in str(error):
        return (
            f"MASTER_PORT={os.environ.get('MASTER_PORT')} is in use by another process here: "
            "set another one"
        )
    host = _HOST.search(str(error))
    where = f"on {host[1]}" if host else "of this job"
    lost = (
        f"the connection to a process {where} broke: the process, its machine or the network failed"
    )
    if is_broken_connection(error):
        return f"{lost} (resume=auto continues from the last checkpoint)"
    return None
