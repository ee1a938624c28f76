"""A job's process: it ends with the command that started it, and signals reach it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import ROOT, checkout_environment, wait_for

from flashtrain.run import job_process
from flashtrain.run.job_process import PARENT, JobProcesses, end_with_parent

# A job that writes where it is, and "saved" when it is told to end.
JOB = """
import os, pathlib, signal, sys, time
from flashtrain.run.job_process import end_with_parent
folder = pathlib.Path(sys.argv[1])
def save(*_):
    (folder / "saved").write_text("")
    raise SystemExit(143)
signal.signal(signal.SIGTERM, save)
end_with_parent()
(folder / "job.new").write_text(str(os.getpid()))
(folder / "job.new").rename(folder / "job")
time.sleep(3600)
"""
PARENT_SCRIPT = """
import signal, sys
# Whatever the tests were started by, in the background too.
signal.signal(signal.SIGINT, signal.SIG_DFL)
from flashtrain.run import job_process
job_process.job_command = lambda: [sys.executable, "-c", sys.argv[2]]
with job_process.JobProcesses() as processes:
    status = processes.run([sys.argv[1]])
print(status, processes.stopped_by.name)
"""


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
        if not Path("/proc/self").exists():
            return True
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):  # it may end between the two
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_job_saves_and_ends_when_its_command_is_killed_or_reported_to_end(
    tmp_path: Path, number
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT_SCRIPT, str(tmp_path), JOB],
        env=checkout_environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # no terminal whose Ctrl-C would reach the job by itself
    )
    try:
        assert wait_for((tmp_path / "job").exists)
        job = int((tmp_path / "job").read_text())
        parent.send_signal(number)
        assert wait_for(lambda: not is_alive(job))
        assert (tmp_path / "saved").exists()
        told, _ = parent.communicate()
        assert told == ("" if number == signal.SIGKILL else f"143 {number.name}\n")
    finally:
        parent.kill()
        parent.wait()


def test_what_a_job_starts_itself_is_not_reported_of_the_sweep(monkeypatch) -> None:
    monkeypatch.setenv(PARENT, str(os.getppid()))
    monkeypatch.setattr(job_process, "_watch", lambda parent: None)
    end_with_parent()
    assert PARENT not in os.environ


def test_handlers_are_as_they_were_afterwards_and_what_is_ignored_stays_so() -> None:
    interrupt, terminate = (
        signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.getsignal(signal.SIGTERM),
    )
    try:
        with JobProcesses():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != terminate
        assert signal.getsignal(signal.SIGTERM) == terminate
    finally:
        signal.signal(signal.SIGINT, interrupt)


def test_ctrl_c_before_a_training_is_one_line_and_status_130_wherever_it_comes() -> None:
    # What an import that is broken off raises is the library's choice.
    broken_off = (
        "import os, signal, sys; from flashtrain import __main__ as command\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def work(words):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n"
        "        raise ImportError('partially initialized module')\n"
        "command._command = work\n"
        "command.main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", broken_off], capture_output=True, text=True, cwd=ROOT
    )
    assert (ended.returncode, ended.stderr) == (130, "flashtrain: stopped by Ctrl-C\n")
