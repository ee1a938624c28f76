"""Run the jobs of a sweep or a study in processes of their own, which end when the command
that started them ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from flashtrain.interruption import ENDING, handle, interrupt, leave_closed_terminal, restore

# Hydra 1.3's launchers pass no signals on: joblib's jobs live on as orphans when their parent is
# killed, and submitit's local jobs run all at once.
PARENT = "FLASHTRAIN_PARENT"  # in a job's environment: the process that started it
_SECONDS = 0.5  # between a job's checks that this process is alive


class JobProcesses:
    """Context manager that runs jobs as processes; a signal that ends this process is passed on to
    the job, which gets time to save a checkpoint.

    `stopped_by` is the first such signal, or None; after a signal no further job should be started.
    """

    def __init__(self) -> None:
        self.stopped_by: signal.Signals | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> JobProcesses:
        if threading.current_thread() is threading.main_thread():
            self._before = handle(self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        restore(self._before)

    def run(
        self, words: list[str], *, command: list[str] | None = None, output: int | None = None
    ) -> int:
        """Run a command and wait for its end.

        Args:
            words: the command's arguments.
            command: the program; None: this program.
            output: where stdout and stderr go, as for subprocess; None: where
                this process's own go.

        Returns:
            The exit status, negative for a signal.
        """
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", PARENT: str(os.getpid())}
        self._process = subprocess.Popen(
            [*(command or job_command()), *words], env=environment, stdout=output, stderr=output
        )
        try:
            if self.stopped_by is not None:  # the signal came while the process was being started
                self._process.terminate()
            return self._process.wait()
        except BaseException:  # outside the main thread there is no handler
            self._process.terminate()
            self._process.wait()
            raise
        finally:
            self._process = None

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.stopped_by = self.stopped_by or signal.Signals(number)
        leave_closed_terminal()
        if self._process is not None:  # at a terminal it also gets the Ctrl-C itself
            self._process.terminate()


def job_command() -> list[str]:
    """Return the command of this program: `python -m flashtrain`, or the user's
    script that calls main()."""
    main_module = sys.modules["__main__"]
    spec = getattr(main_module, "__spec__", None)
    if spec is None:
        return [sys.executable, str(Path(sys.argv[0]).resolve())]
    return [sys.executable, "-m", spec.name.removesuffix(".__main__")]


@contextmanager
def leading_ranks(several: bool) -> Iterator[None]:
    """Context manager: ranks that Lightning starts in the `with` block end when this process ends.
    `several`: whether Lightning starts any.

    If it does, SIGTERM and SIGHUP end this process at once within the block, and print nothing.
    """
    # If it is killed before the ranks have met, they would wait for it for half an hour. It waits
    # for them in native code, where Python calls no handler.
    heard = [
        number
        for number in ENDING
        if signal.getsignal(number) is interrupt and number != signal.SIGINT
    ]
    before = {number: signal.signal(number, signal.SIG_DFL) for number in heard if several}
    os.environ[PARENT] = str(os.getpid())
    try:
        yield
    finally:
        restore(before)
        os.environ.pop(PARENT, None)


def end_with_parent() -> None:
    """Start a thread that sends SIGTERM to this process, a job or rank, when its parent process is
    gone."""
    parent = os.environ.pop(PARENT, "")  # not for what this process starts itself
    if parent.isdecimal():
        threading.Thread(
            target=_watch, args=(int(parent),), daemon=True, name="parent-watch"
        ).start()


def _watch(parent: int) -> None:
    # An orphan gets another parent: the only sign that every system has.
    while os.getppid() == parent:
        time.sleep(_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
