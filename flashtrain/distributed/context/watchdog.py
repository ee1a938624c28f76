"""Ends the job when a rank has died, failed or is stuck, with a line that names it.

Ranks that wait in a collective cannot know which rank is missing: NCCL's own timeout names an operation, not a rank,
and torchrun (torch 2.13) blames rank 0 if rank 1 was stopped. So every few seconds a thread of each rank writes its
progress into a small store and reads that of the others. A rank that no longer writes is dead; if no rank progresses,
the one furthest behind is stuck. Then every rank prints this and exits.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: trying again may work
LONGEST_SILENCE = 60.0  # seconds without a sign after which a rank is dead, whatever the timeout
BEATS = 10  # signs in that time
GRACE = 10.0  # seconds that the others have to end by themselves once a rank has failed


class Beat(NamedTuple):
    """What a rank last wrote: its state, how often it wrote, how many marks it has passed, and the latest one."""

    state: str
    beats: int
    progress: int
    doing: str

    def __str__(self) -> str:
        return f"{self.state}|{self.beats}|{self.progress}|{self.doing}"

    @classmethod
    def parse(cls, text: str) -> Beat:
        state, beats, progress, doing = text.split("|", 3)
        return cls(state, int(beats), int(progress), doing)


ALIVE, FAILED, GONE = "alive", "failed", "gone"
VERDICT = "verdict"


class Record:
    """The latest signs of life of all ranks, and the verdict on them."""

    def __init__(self, size: int, silence: float, timeout: float, now: float) -> None:
        self.size, self.silence, self.timeout = size, silence, timeout
        self.latest: dict[int, Beat] = {}
        self._heard = dict.fromkeys(range(size), now)
        self._moved = now
        self._failure: float | None = None

    def note(self, rank: int, beat: Beat, now: float) -> None:
        """Record a rank's latest beat."""
        before = self.latest.get(rank)
        if beat == before:
            return
        if before is None or beat.progress != before.progress:
            self._moved = now
        if beat.state == FAILED and self._failure is None:
            self._failure = now
        self._heard[rank] = now
        self.latest[rank] = beat

    def verdict(self, now: float) -> str | None:
        """The line that ends the job; None if no rank has a problem."""
        for rank, beat in self.latest.items():
            if beat.state == FAILED and self._failure is not None and now - self._failure > min(GRACE, self.silence):
                return f"rank {rank} of {self.size} has failed: {beat.doing}"
        for rank in range(self.size):
            if rank not in self.latest and now - self._heard[rank] > self.silence:
                return f"rank {rank} of {self.size} has given no sign of life for {self.silence:g} s"
        alive = {rank: beat for rank, beat in self.latest.items() if beat.state == ALIVE}
        for rank, beat in alive.items():
            if now - self._heard[rank] > self.silence:
                ended = f"rank {rank} of {self.size} has died or hangs at {beat.doing}"
                return f"{ended}: no sign of it for {self.silence:g} s"
        if not alive or now - self._moved <= self.timeout:
            return None
        behind = min(beat.progress for beat in alive.values())
        stuck = [rank for rank, beat in alive.items() if beat.progress == behind]
        doing = alive[stuck[0]].doing
        if len(stuck) == len(alive):
            return f"no rank has progressed for {self.timeout:g} s: all {len(stuck)} are at {doing}"
        return (
            f"rank {', '.join(map(str, stuck))} of {self.size} is stuck at {doing}: no rank has progressed for "
            f"{self.timeout:g} s, the others wait for it"
        )


class Watchdog:
    """Watches all ranks of the job from `start` to `stop`; `mark` reports progress of this one.

    Args:
        timeout: seconds without progress of any rank after which the job is stuck: more than the longest time between
            two marks (a step, a checkpoint, an evaluation). A rank without a sign of life for this time, or for a
            minute, is dead.
        end: called with the line that names the rank; None: print it and exit the process at once, because a thread
            that waits in a collective cannot be interrupted.
        on_failure: called with that line before.
    """

    def __init__(
        self,
        timeout: float,
        *,
        end: Callable[[str], None] | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self.timeout = timeout
        self.silence = min(timeout, LONGEST_SILENCE)
        self._end = end or _exit
        self._on_failure = on_failure
        self._progress, self._doing = 0, "the start"
        self._last_word: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def mark(self, doing: str) -> None:
        """This rank now is at `doing` ("step 12")."""
        self._progress += 1
        self._doing = doing

    def start(self) -> None:
        """Begin to watch; every rank must call it, after init_process_group. Once started it goes on."""
        self.mark("the start")
        if dist.get_world_size() == 1 or self._thread is not None:
            return
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = _own_store(self.rank, self.silence)
        self._stop.clear()
        self._store.set(str(self.rank), str(self._own(False, 0)))
        self._thread = threading.Thread(target=self._watch, name="flashtrain-watchdog", daemon=True)
        self._thread.start()

    def stop(self, failure: str | None = None) -> None:
        """Watch no longer. The others then do not miss this rank; with a failure they end, and name it."""
        if self._thread is None:
            return
        self._last_word = failure
        self._stop.set()
        self._thread.join(self.silence)
        self._thread = None
        if self.rank == 0:  # which holds the store: it must not be gone before the others have read and written
            self._outstay(shortly=failure is not None)

    def await_verdict(self) -> None:
        """For a rank whose collective broke off: who is to blame is known soon, and then this does not return."""
        if self._thread is not None:
            self._thread.join(2 * self.silence + GRACE)

    def _watch(self) -> None:
        record = Record(self.size, self.silence, self.timeout, time.monotonic())
        beats = 0
        while True:
            ending = self._stop.wait(self.silence / BEATS)
            beats += 1
            try:
                self._store.set(str(self.rank), str(self._own(ending, beats)))
                if ending:
                    return
                for rank in range(self.size):
                    beat = self._read(rank)
                    if beat is not None:
                        record.note(rank, beat, time.monotonic())
                message = self._agreed(record.verdict(time.monotonic()))
            except (RuntimeError, OSError):  # what the store's client raises when its host is gone
                message = None if self._stop.is_set() else _host_is_gone(record)
            if message is not None:
                try:
                    if self._on_failure is not None:
                        self._on_failure(message)
                finally:
                    self._end(message)
            if message is not None or self._stop.is_set():
                return

    def _read(self, rank: int) -> Beat | None:
        name = str(rank)
        return Beat.parse(self._store.get(name).decode()) if self._store.check([name]) else None

    def _agreed(self, message: str | None) -> str | None:
        """The verdict that some rank came to first, so that all say the same."""
        if message is None and not self._store.check([VERDICT]):
            return None
        first = self._store.compare_set(VERDICT, "", message or "").decode()
        if self.rank == 0:
            self._outstay(shortly=True)
        return first

    def _outstay(self, shortly: bool) -> None:
        """Stay until no other rank watches any longer; shortly: for so long that they have read what was written."""
        beat = self.silence / BEATS
        end = time.monotonic() + (3 * beat if shortly else self.silence)
        while time.monotonic() < end:
            others = [self._read(rank) for rank in range(1, self.size)]
            if all(other is not None and other.state != ALIVE for other in others):
                return
            time.sleep(beat / 4)

    def _own(self, ending: bool, beats: int) -> Beat:
        if not ending:
            return Beat(ALIVE, beats, self._progress, self._doing)
        if self._last_word is None:
            return Beat(GONE, beats, self._progress, self._doing)
        return Beat(FAILED, beats, self._progress, self._last_word)


def _host_is_gone(record: Record) -> str | None:
    host = record.latest.get(0)
    if host is not None and host.state == GONE:
        return None
    last = "" if host is None else f": {host.doing}" if host.state == FAILED else f", last at {host.doing}"
    verb = "failed" if host is not None and host.state == FAILED else "died"
    return f"rank 0 of {record.size} has {verb}{last}"


def _exit(message: str) -> None:
    print(f"flashtrain: {message}. The job ends.", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


def _own_store(rank: int, silence: float) -> dist.TCPStore:
    """A store of the watchdogs' own on rank 0's machine: one that training waits in would make the threads wait too."""
    wait = timedelta(seconds=silence)
    address: list[tuple[str, int] | None] = [None]
    store = None
    if rank == 0:
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=wait)
        address = [(host, store.port)]
    dist.broadcast_object_list(address, src=0)
    if store is not None:
        return store
    assert address[0] is not None
    return dist.TCPStore(*address[0], is_master=False, wait_for_workers=False, timeout=wait)
