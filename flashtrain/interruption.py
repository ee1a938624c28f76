"""The signals that end a command: SIGTERM, SIGHUP (its terminal is closed) and SIGINT (Ctrl-C)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

ENDING = [
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name)
]
GRACE = 10.0  # seconds in which Python's own handlers may act on a second Ctrl-C


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
    command's exit status, `steps` the optimizer steps that were made; None: unknown."""

    def __init__(self, line: str, status: int, steps: int | None = None) -> None:
        super().__init__(line)
        self.status, self.steps = status, steps


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


@contextmanager
def ended_by_second_interrupt() -> Iterator[None]:
    """Context manager: GRACE seconds after a second Ctrl-C within the `with` block the process has
    ended: a thread ends it if a long native call, which Python's handlers wait for, does not."""
    received, sent = os.pipe()
    os.set_blocking(sent, False)
    before, over = signal.set_wakeup_fd(sent, warn_on_full_buffer=False), threading.Event()
    # A forked worker of a data loader also gets the terminal's Ctrl-C.
    os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))

    def watch() -> None:
        interrupts = 0
        while interrupts < 2 and (number := os.read(received, 1)):
            interrupts += number[0] == signal.SIGINT
        os.close(received)
        if not over.wait(GRACE):
            os.write(2, b"flashtrain: ended by a second Ctrl-C in the middle of a computation\n")
            os._exit(128 + signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        os.close(sent)


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
