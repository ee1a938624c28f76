"""The signals that end a command: SIGTERM, SIGHUP (its terminal is closed) and SIGINT (Ctrl-C)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

ENDING = [
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name)
]


class Interrupted(KeyboardInterrupt):
    """Raised when the signal `number` ends a command; its text names the signal. A
    KeyboardInterrupt, so that code which cleans up after Ctrl-C also does so after SIGTERM and
    SIGHUP."""

    def __init__(self, number: int, line: str = "") -> None:
        self.number, self.status = signal.Signals(number), 128 + number
        super().__init__(
            line or f"stopped by {'Ctrl-C' if number == signal.SIGINT else self.number.name}"
        )


class Stopped(Exception):
    """A signal or the time limit ended the run; its checkpoint is saved. `status` is the
    command's exit status."""

    def __init__(self, line: str, status: int) -> None:
        super().__init__(line)
        self.status = status


def handle(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Set this handler for the three signals, except for ignored ones (nohup ignores SIGHUP);
    return the earlier handlers by signal number, for `restore`."""
    before = {number: signal.getsignal(number) for number in ENDING}
    heard = {number: earlier for number, earlier in before.items() if earlier != signal.SIG_IGN}
    for number in heard:
        signal.signal(number, handler)
    return heard


def restore(before: Mapping[int, Any]) -> None:
    """Set the handlers that `handle` returned."""
    for number, handler in before.items():
        # None: not set by Python, so it cannot be restored, and the default replaces it.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def end_at_once(number: int, _: FrameType | None) -> None:
    """Signal handler that ends the process at once, for a command with nothing to clean up: an
    exception could be swallowed by an import."""
    leave_closed_terminal()
    os.write(2, f"flashtrain: {Interrupted(number)}\n".encode())
    os._exit(128 + number)


def interrupt(number: int, _: FrameType | None) -> None:
    """Signal handler that raises Interrupted, for a command with something to clean up."""
    leave_closed_terminal()
    for other in set(ENDING) - {signal.SIGINT}:  # a closed terminal and its shell send several
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(number)


def leave_closed_terminal() -> None:
    """Redirect standard output and error to the null device if their terminal is closed, since each
    printed line would raise an OSError."""
    for output in (1, 2):
        try:
            os.write(output, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
