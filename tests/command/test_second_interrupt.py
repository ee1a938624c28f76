"""A second Ctrl-C ends the command, also in a native call, in which no handler of Python's runs."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from tiny_runs import wait_for

from flashtrain import interruption
from flashtrain.interruption import ended_by_second_interrupt

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="a mutex of zeros and /proc are Linux's"
)
FORK = multiprocessing.get_context("fork")


def native_call() -> None:
    """Never returns: it locks a mutex that it has locked. A large model's backward is such a call
    for minutes."""
    mutex, libc = ctypes.create_string_buffer(128), ctypes.CDLL(None)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)


def received(process: BaseProcess) -> bool:
    """Whether every signal sent to the process has reached it: two that wait are one."""
    lines = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
    return not any(int(line.split()[1], 16) for line in lines if "Pnd:" in line)


@pytest.fixture
def command():
    """Starts a command that does this `work`; its handler of Ctrl-C does nothing."""
    begun: list[BaseProcess] = []

    def start(work: Callable[[], None], grace: float = 0.1) -> BaseProcess:
        ready = FORK.Event()

        def command() -> None:
            interruption.GRACE = grace
            signal.signal(signal.SIGINT, lambda *_: None)
            with ended_by_second_interrupt():
                ready.set()
                work()

        begun.append(FORK.Process(target=command))
        begun[0].start()
        assert ready.wait(600)
        return begun[0]

    yield start
    begun[0].kill()


def test_the_second_ctrl_c_ends_a_native_call_and_the_first_does_not(command, capfd) -> None:
    process = command(native_call)
    os.kill(process.pid, signal.SIGINT)
    assert wait_for(lambda: received(process))
    process.join(1)
    assert process.exitcode is None
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130
    assert "flashtrain: ended by a second Ctrl-C" in capfd.readouterr().err


def test_what_ends_by_itself_is_not_ended(command) -> None:
    process = command(lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)], grace=60)
    process.join(600)
    assert process.exitcode == 0


def test_a_workers_ctrl_c_is_not_counted(command) -> None:
    """A terminal sends Ctrl-C to every process of a command, so to a data loader's workers too."""

    def work() -> None:
        worker = FORK.Process(target=interrupted_twice)
        worker.start()
        worker.join()
        threading.Event().wait(1)

    process = command(work)
    process.join(600)
    assert process.exitcode == 0


def interrupted_twice() -> None:
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)


def test_nothing_is_watched_afterwards() -> None:
    before = signal.set_wakeup_fd(-1)
    with ended_by_second_interrupt():
        watched = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(watched)
    assert watched != -1
    assert signal.set_wakeup_fd(before) == -1
