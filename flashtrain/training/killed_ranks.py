"""Says which rank was killed before Lightning ends the job over it.

Lightning starts a job's other ranks as processes of the first one, and once one of them is gone it kills the first with
SIGKILL: nothing can be printed any more, and what it says itself before is a line at INFO, which the command silences.
A rank that was killed from outside (by Linux where host memory ran out, say) would end the job without a word.
"""

from __future__ import annotations

import logging
import re
import signal
import sys
from collections.abc import Callable

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
        number = int(found[2])
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        hint = ", as the system does where host memory runs out" if name == "SIGKILL" else ""
        line = f"rank {found[1]} was killed ({name}{hint})"
        print(f"flashtrain: {line}. The job ends.", file=sys.stderr, flush=True)
        if self.note is not None:
            self.note(line)
