"""Says which rank a signal killed, before Lightning ends the job over it.

pytorch-lightning 2.6.6 starts a job's other ranks as processes of the first one, and once one of them is gone it kills
the first with SIGKILL: nothing can be printed any more, and what it says itself before is a line at INFO. A rank that
was killed from outside (by Linux where host memory ran out, say) would end the job without a word.
"""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

LAUNCHER = "lightning_fabric.strategies.launchers.subprocess_script"
# "[rank: 1] Child process with PID 21848 terminated with code -9. ..."
_TOLD = re.compile(r"\[rank: (\d+)\].* terminated with code -(\d+)\b")


def name_killed_ranks(note: Callable[[str], None] | None = None) -> None:
    """Print a line that names a rank killed by a signal, and call `note` with it. For the command, not for the library.

    A rank that ends by itself has said why. Called again, the last `note` is the one that counts.
    """
    logger = logging.getLogger(LAUNCHER)
    for handler in logger.handlers:
        if isinstance(handler, _Teller):
            handler.note = note
            return
    logger.setLevel(logging.INFO)
    logger.propagate = False  # Lightning's own words for it need not be read as well
    logger.addHandler(_Teller(note))


class _Teller(logging.Handler):
    def __init__(self, note: Callable[[str], None] | None) -> None:
        super().__init__()
        self.note = note

    def emit(self, record: logging.LogRecord) -> None:
        found = _TOLD.search(record.getMessage())
        if found is None:
            return
        line = _killed(found[1], int(found[2]))
        print(f"flashtrain: {line}. The job ends.", file=sys.stderr, flush=True)
        if self.note is not None:
            self.note(line)


def killed_rank(ranks: Sequence[subprocess.Popen[bytes]], seconds: float = 2.0) -> str | None:
    """A line that names the first of these ranks (rank 1 and on) that a signal killed; None: none was.

    For where a collective has failed: whoever lost its peer hears of it before the peer's end is known, which is waited
    for here, and before Lightning's observer looks.
    """
    until = time.monotonic() + seconds
    while True:
        codes = [rank.poll() for rank in ranks]
        for number, code in enumerate(codes, 1):
            if code is not None and code < 0:
                return _killed(number, -code)
        if None not in codes or time.monotonic() > until:
            return None
        time.sleep(0.02)


def _killed(rank: int | str, number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = ", as the system does where host memory runs out" if name == "SIGKILL" else ""
    return f"rank {rank} was killed ({name}{hint})"
