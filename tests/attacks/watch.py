"""One attempt in a forked process: how it ended, what it said, took and held, and what it touched outside its folders.

The parent imports everything once and stays without threads; each attempt is a fork of it, so it costs no imports, a
crash is only its own, and nothing that it leaves in memory reaches the next. Python's audit events tell of every file
that is opened for writing, moved or removed, and of programs and connections that are started: what lies outside of the
given folders is noted and ends the attempt at once. Libraries in C write past these events; for them the folders
around are compared before and after.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import resource
import signal
import socket
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GIB = 2**30
MOST_MEMORY = 4 * GIB  # resident, of one attempt
HARD_LIMIT = 6 * GIB  # of private memory: beyond it an allocation fails, so that the machine lives on
LONGEST_LINE = 2400  # characters: UserError cuts its text at 2,000
PATIENCE = 60.0  # seconds
OUTSIDE = 99  # the exit status of an attempt that reached outside
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x9f\u202a-\u202e\u2066-\u2069]")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Events of Python's audit hooks that change what is on a disk: the places of paths among their arguments, and of the
# folders (as descriptors) that these are relative to.
CHANGES = {
    "os.remove": ((0,), (1,)),
    "os.rmdir": ((0,), (1,)),
    "os.mkdir": ((0,), (2,)),
    "os.rename": ((0, 1), (2, 3)),
    "os.link": ((1,), (3,)),
    "os.symlink": ((1,), (2,)),
    "os.truncate": ((0,), ()),
    "os.chmod": ((0,), (2,)),
    "os.chown": ((0,), (3,)),
    "os.utime": ((0,), (3,)),
    "shutil.rmtree": ((0,), (1,)),
}
PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
# The project's own, and reads nothing but its parameters.
GENERATOR = ["-m", "flashtrain_recipes.arena.pathfinder.generate"]


@dataclass
class Outcome:
    """How an attempt ended. status: its exit status, below 0 the signal that ended it. peak: bytes, resident. left:
    processes that it started and that outlived it by PATIENCE."""

    status: int
    output: str
    seconds: float
    peak: int
    hung: bool = False
    outside: list[str] = field(default_factory=list)
    left: int = 0

    def failure(self, allowed: Sequence[int] = (0, 2)) -> str | None:
        """What is wrong with it, in a word or two and a line of its output; None where it ended as it should.

        As it should: with one of the `allowed` exit statuses, 2 being a mistake told in one printable line.
        """
        last = next((line for line in reversed(self.output.splitlines()) if line.strip()), "")
        if self.outside:
            return f"outside: {self.outside[0]}"
        if self.hung:
            return f"hang: {last[:160]}"
        if self.peak > MOST_MEMORY:
            return f"memory: {self.peak / GIB:.1f} GiB"
        if "Traceback (most recent call last)" in self.output:
            return f"traceback: {_exception_line(self.output)[:240]}"
        if self.status < 0:
            return f"crash: {signal.Signals(-self.status).name} {last[:160]}"
        if self.status not in allowed:
            return f"status {self.status}: {last[:200]}"
        found = CONTROL.search(self.output)
        if found is not None:
            return f"terminal codes: {self.output[max(0, found.start() - 60) : found.end() + 20]!r}"
        told = [line for line in self.output.splitlines() if line.startswith(("flashtrain: ", "error: "))]
        if self.status == 2 and (len(told) != 1 or last != told[0]):
            return f"not one line: {last[:200]}"
        if any(len(line) > LONGEST_LINE for line in told):
            return f"long line: {len(max(told, key=len))} characters"
        return None


def attempt(
    action: Callable[[], int | None],
    *,
    log: Path,
    inside: Iterable[Path],
    seconds: float,
    on_change: Callable[[str, str], None] | None = None,
    programs: bool = False,
    while_running: Callable[[int, float], None] | None = None,
) -> Outcome:
    """Run `action` in a fork of this process and watch it. Its return value, or SystemExit's, is the exit status.

    log: a file for what it prints. inside: the folders that it may write to. on_change: called in the fork before each
    change of a file inside (event, path). programs: it may start programs. while_running: called in this process with
    (process, seconds so far) about 200 times a second.
    """
    folders = [os.path.realpath(folder) for folder in inside]
    notes = log.with_suffix(".outside")
    notes.unlink(missing_ok=True)
    began = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        _child(action, log, notes, folders, on_change, programs)
    hung = False
    while True:
        ended, status, usage = os.wait4(process, os.WNOHANG)
        if ended:
            break
        if time.monotonic() - began > seconds and not hung:
            hung = True
            _kill_group(process)
        if while_running is not None and not hung:
            while_running(process, time.monotonic() - began)
        time.sleep(0.005)
    taken = time.monotonic() - began
    left = _session(process)
    until = time.monotonic() + PATIENCE
    while left and time.monotonic() < until:
        time.sleep(0.05)
        left = _session(process)
    for orphan in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(orphan, signal.SIGKILL)
    output = log.read_bytes().decode("utf-8", errors="replace") if log.exists() else ""
    outside = notes.read_text(errors="replace").splitlines() if notes.exists() else []
    return Outcome(os.waitstatus_to_exitcode(status), output, taken, usage.ru_maxrss * 1024, hung, outside, len(left))


def snapshot(root: Path, without: Iterable[Path] = ()) -> dict[str, str]:
    """Everything below `root` but the folders `without`: path -> kind and content's hash. Links are not followed."""
    skipped = {str(path) for path in without}
    found: dict[str, str] = {}
    for current, folders, files in os.walk(root):
        folders[:] = [name for name in folders if os.path.join(current, name) not in skipped]  # noqa: PTH118
        for name in (*folders, *files):
            path = Path(current, name)
            if str(path) in skipped:
                continue
            status = path.lstat()
            content = ""
            if stat.S_ISLNK(status.st_mode):
                content = str(path.readlink())
            elif stat.S_ISREG(status.st_mode):
                content = hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
            found[str(path)] = f"{stat.S_IFMT(status.st_mode):o} {content}"
    return found


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """What differs between two snapshots, one line each."""
    return [
        *(f"removed {path}" for path in sorted(before.keys() - after.keys())),
        *(f"made {path}" for path in sorted(after.keys() - before.keys())),
        *(f"changed {path}" for path in sorted(before.keys() & after.keys()) if before[path] != after[path]),
    ]


def _child(
    action: Callable[[], int | None],
    log: Path,
    notes: Path,
    folders: list[str],
    on_change: Callable[[str, str], None] | None,
    programs: bool,
) -> None:
    status = 1
    try:
        os.setsid()
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        noted = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_DATA, (HARD_LIMIT, HARD_LIMIT))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.addaudithook(_Hook(folders, noted, on_change, programs))
        status = action() or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - whatever it is, the parent must hear of it
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


class _Hook:
    """The audit hook of an attempt."""

    def __init__(
        self, folders: list[str], notes: int, on_change: Callable[[str, str], None] | None, programs: bool
    ) -> None:
        self.folders = folders
        self.notes = notes
        self.on_change = on_change
        self.programs = programs

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & WRITING and isinstance(path, str | bytes | os.PathLike):
                self._changes(event, os.path.realpath(os.fsdecode(path)))
        elif event in CHANGES:
            paths, descriptors = CHANGES[event]
            for number, place in enumerate(paths):
                folder = arguments[descriptors[number]] if number < len(descriptors) else None
                self._changes(event, _place(arguments[place], folder))
        elif event in PROGRAMS and not self.programs and not _is_generator(event, arguments):
            self._note(f"{event} {str(arguments[0])[:200]}")
        elif event == "socket.connect" and _leaves_machine(*arguments):
            self._note(f"{event} {arguments[1]}")

    def _changes(self, event: str, path: str) -> None:
        if any(path == folder or path.startswith(folder + os.sep) for folder in self.folders):
            if self.on_change is not None:
                self.on_change(event, path)
        elif not path.startswith(("/dev/", "/proc/", "pipe:", "socket:")):
            self._note(f"{event} {path}")

    def _note(self, line: str) -> None:
        """Say what was tried, and end the process before it happens."""
        os.write(self.notes, f"{line}\n".encode(errors="replace"))
        os._exit(OUTSIDE)


def _place(path: Any, folder: Any) -> str:
    """Where a path leads whose last part may be a link, which is not followed."""
    if isinstance(path, int):
        return os.path.realpath(f"/proc/self/fd/{path}")
    text = os.fsdecode(path)
    if isinstance(folder, int) and folder >= 0 and not os.path.isabs(text):  # noqa: PTH117
        text = os.path.join(os.path.realpath(f"/proc/self/fd/{folder}"), text)  # noqa: PTH118
    parent, name = os.path.split(os.path.abspath(text))  # noqa: PTH100
    return os.path.join(os.path.realpath(parent), name)  # noqa: PTH118


def _leaves_machine(connection: Any, address: Any) -> bool:
    return connection.family != socket.AF_UNIX and str(address[0]) not in ("127.0.0.1", "localhost", "::1")


def _exception_line(output: str) -> str:
    """The innermost exception's line, and where in flashtrain it came through."""
    lines = output.splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("Traceback (most recent"))
    told = next((line for line in lines[last + 1 :] if line and not line[0].isspace()), lines[-1])
    own = [line.strip() for line in lines[last:] if 'File "' in line and ("/flashtrain/" in line)]
    where = re.search(r"(flashtrain/[^\"]+)\", line (\d+)", own[-1]) if own else None
    return f"{told} ({where[1]}:{where[2]})" if where else told


def _session(leader: int) -> list[int]:
    """The living processes of the session that a process led, itself aside."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            told = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(told[3]) == leader and told[0] != "Z" and int(entry.name) != leader:
                found.append(int(entry.name))
    return found


def _kill_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def _is_generator(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether the project starts its own generator of images, as it does without pathfinder.workers=1."""
    words = list(map(str, arguments[1])) if event == "subprocess.Popen" else []
    return words[:1] == [sys.executable] and words[1:3] == GENERATOR
