"""Work in several processes, one for each rank: receive what they send, and report the
first failure in one line.

torch.multiprocessing (2.13) names whichever failed rank it sees first, though that rank may have
failed because another did. Here each rank sends when it failed, and the earliest is named.
"""

from __future__ import annotations

import math
import os
import signal
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from torch.multiprocessing import ProcessExitedException, get_context, start_processes

from flashtrain.announce import quieten
from flashtrain.errors import RunFailed, causes, first_line
from flashtrain.training.out_of_memory import is_out_of_memory

START_METHOD = "spawn"  # CUDA allows no other
_GRACE_SECONDS = 1.0  # in which the other ranks may send, too, why they failed


class Failure(NamedTuple):
    """The time and the cause of a rank's failure, as the rank sends them."""

    # When, as time.monotonic() gives it, which is one clock for all processes of a machine.
    moment: float
    line: str
    trace: str = ""
    full: bool = False  # whether it ran out of memory
    title: str = ""  # the error's attribute `title`, where it has one

    @classmethod
    def of(cls, error: Exception, rank: int, size: int) -> Failure:
        line = f"rank {rank} of {size} failed: {first_line(error)}"
        full = any(is_out_of_memory(one) for one in causes(error))
        return cls(
            time.monotonic(), line, traceback.format_exc(), full, getattr(error, "title", "")
        )


class RankFailed(RunFailed):
    """The error that `in_ranks` raises if a rank failed. Its message is one line;
    `failure` has the traceback."""

    def __init__(self, failure: Failure, more: str = "") -> None:
        super().__init__(failure.line + more)
        self.failure = failure


def in_ranks(
    work: Callable[..., None], arguments: tuple[Any, ...], size: int, *, until: float = math.inf
) -> Generator[Any, None, None]:
    """Run work(rank, send, *arguments) in `size` processes, and yield every object
    that they pass to `send`.

    When the generator ends, for any reason, no process is left.

    Args:
        until: the time.monotonic() at which the work is given up.

    Raises:
        TimeoutError: `until` was reached.
        RankFailed: a rank failed; the error is that of the first one.
    """
    failures: list[Failure] = []
    with get_context(START_METHOD).Manager() as manager:
        sent = manager.Queue()
        ranks: Any = start_processes(
            _rank, (work, size, sent, arguments), size, join=False, start_method=START_METHOD
        )
        over, error = False, None
        try:
            while not over:
                try:
                    over = ranks.join(timeout=0.1, grace_period=_GRACE_SECONDS)
                except ProcessExitedException as raised:
                    over, error = True, raised
                while not sent.empty():
                    message = sent.get()
                    if isinstance(message, Failure):
                        failures.append(message)
                    else:
                        yield message
                if not over and time.monotonic() >= until:
                    raise TimeoutError
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
    if error is not None:
        first = _first([process.exitcode for process in ranks.processes], error, failures)
        raise RankFailed(first) from RuntimeError(first.trace)


def _first(
    codes: Sequence[int], error: ProcessExitedException, failures: Sequence[Failure]
) -> Failure:
    size = len(codes)
    for rank, code in enumerate(codes):
        if code < 0 and code != -signal.SIGTERM:  # by which join ends those that wait
            return Failure(0, f"rank {rank} of {size} died ({signal.Signals(-code).name})")
    line = f"rank {error.error_index} of {size} ended with status {error.exit_code}"
    return min(failures, default=Failure(0, line))


def _rank(
    rank: int, work: Callable[..., None], size: int, sent: Any, arguments: tuple[Any, ...]
) -> None:
    # Which torch sends where the first process is gone: ends all waiting.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    quieten()
    try:
        work(rank, sent.put, *arguments)
    except Exception as error:  # noqa: BLE001 - sent to the process that started this one
        sent.put(Failure.of(error, rank, size))
        os._exit(1)
