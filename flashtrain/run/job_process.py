"""Jobs as processes of their own, one after the other: of a sweep, and of a comparison of contexts.

A job does not outlive the command that started it: signals are passed on, and where the command is killed outright the
job notices, finishes its step, writes its checkpoint and ends, as on SIGTERM. (Hydra 1.3's launchers pass nothing on:
joblib's jobs go on as orphans once their parent is killed, and submitit's local ones run all at once.)
"""

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

PARENT = "FLASHTRAIN_PARENT"  # in a job's environment: the process that started it
_SECONDS = 0.5  # between a job's looks at whether that is still there


class JobProcesses:
    """Within the context, signals that end this command end the job that runs, and are waited for: the job writes its
    checkpoint. `stopped_by` is the first of them; nothing new should be started then."""

    def __init__(self) -> None:
        self.stopped_by: signal.Signals | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> JobProcesses:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) != signal.SIG_IGN:  # as a shell's background has it
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def run(self, words: list[str], *, command: list[str] | None = None, output: int | None = None) -> int:
        """Run the command with these words, and return its exit status, negative for a signal.

        command: how it is started; None: as this program was. output: where it prints, as subprocess has it; None:
        where this process does.
        """
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", PARENT: str(os.getpid())}
        self._process = subprocess.Popen(
            [*(command or job_command()), *words], env=environment, stdout=output, stderr=output
        )
        try:
            if self.stopped_by is not None:  # it came while the process was being started
                self._process.terminate()
            return self._process.wait()
        except BaseException:  # no handler stands outside the main thread
            self._process.terminate()
            self._process.wait()
            raise
        finally:
            self._process = None

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.stopped_by = self.stopped_by or signal.Signals(number)
        if self._process is not None:  # at a terminal it has its Ctrl-C by itself: it then has both
            self._process.terminate()


def job_command() -> list[str]:
    """How to start this program again: as `python -m flashtrain`, or as the user's own script that calls main()."""
    main_module = sys.modules["__main__"]
    spec = getattr(main_module, "__spec__", None)
    if spec is None:
        return [sys.executable, str(Path(sys.argv[0]).resolve())]
    return [sys.executable, "-m", spec.name.removesuffix(".__main__")]


@contextmanager
def leading_ranks() -> Iterator[None]:
    """Whatever starts this command again in here, as Lightning does for a job's other ranks, ends with this process:
    killed before the ranks have met, it would leave them waiting for it for half an hour."""
    os.environ[PARENT] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.pop(PARENT, None)


def end_with_parent() -> None:
    """In a job that JobProcesses started, or a rank: end it as SIGTERM does once its parent is gone."""
    parent = os.environ.pop(PARENT, "")  # not for what this process starts itself
    if parent.isdecimal():
        threading.Thread(target=_watch, args=(int(parent),), daemon=True, name="parent-watch").start()


def _watch(parent: int) -> None:
    # An orphan is given to another parent; there is no other sign of it that every system has.
    while os.getppid() == parent:
        time.sleep(_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
