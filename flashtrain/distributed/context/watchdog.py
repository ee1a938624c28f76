"""Ends the job when a rank has died, failed or is stuck, with a line that names it.

Ranks that wait in a collective cannot know which rank is missing: NCCL's own timeout names an
operation, not a rank, and torchrun (torch 2.13) blames rank 0 if rank 1 was stopped. So every few
seconds a thread of each rank writes its progress into a small store and reads that of the others. A
rank that no longer writes is dead; if no rank progresses, the one furthest behind is stuck. Then
every rank prints this and exits.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from flashtrain.training.killed_ranks import end_job

MAX_SILENCE = 60.0  # seconds without a sign after which a rank is dead, whatever the timeout
BEATS = 10  # signs in that time
GRACE = 10.0  # seconds that the others have to end by themselves once a rank has failed
ALIVE, FAILED, GONE = "alive", "failed", "gone"
VERDICT = "verdict"


class Beat(NamedTuple):
    """A heartbeat: what a rank regularly writes into the store that all ranks read."""

    state: str = ALIVE  # or FAILED, or GONE (the rank stopped watching)
    beats: int = 0  # the number of heartbeats that the rank has written
    progress: int = 0  # the number of calls of Watchdog.mark so far
    doing: str = "the start"  # the text of the latest mark, or why the rank failed


class Record:
    """The latest heartbeats of all ranks, from which it is decided whether a rank is dead or stuck.

    Args:
        size: the number of ranks.
        silence: seconds without a heartbeat after which a rank counts as dead.
        timeout: seconds without progress of any rank after which the job counts as stuck.
        now: the current time in seconds, on the clock that the methods' `now` uses too.
    """

    def __init__(self, size: int, silence: float, timeout: float, now: float) -> None:
        self.size, self.silence, self.timeout = size, silence, timeout
        self.latest = dict.fromkeys(range(size), Beat())
        self._heard = dict.fromkeys(range(size), now)
        self._moved = now
        self._failure: float | None = None

    def note(self, rank: int, beat: Beat, now: float) -> None:
        """Record the latest heartbeat of a rank, read at time `now`."""
        before = self.latest[rank]
        if beat == before:
            return
        if beat.progress != before.progress:
            self._moved = now
        if beat.state == FAILED and self._failure is None:
            self._failure = now
        self._heard[rank] = now
        self.latest[rank] = beat

    def verdict(self, now: float) -> str | None:
        """Return the message with which the job ends, naming the dead or stuck rank; None if
        no rank has a problem."""
        if self._failure is not None and now - self._failure > min(GRACE, self.silence):
            return next(
                self.failure(rank) for rank, beat in self.latest.items() if beat.state == FAILED
            )
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
            f"rank {', '.join(map(str, stuck))} of {self.size} is stuck at {doing}: "
            f"no rank has progressed for {self.timeout:g} s, the others wait for it"
        )

    def failure(self, rank: int) -> str:
        """Return the message about a rank that failed or no longer writes heartbeats."""
        state, _, _, doing = self.latest[rank]
        how = f"failed: {doing}" if state == FAILED else f"died, last at {doing}"
        return f"rank {rank} of {self.size} has {how}"


class Watchdog:
    """Watches all ranks of the job from `start` to `stop`; `mark` reports progress of this rank.

    When a rank has a problem, every rank prints a message that names it and exits at once, because
    a thread that waits in a collective cannot be interrupted.

    Args:
        timeout: seconds without progress of any rank after which the job is stuck: more than the
            longest time between two marks (a step, a checkpoint, an evaluation). A rank without a
            heartbeat for this time, or for a minute, counts as dead. None: never watch.
        on_failure: called with the message before the process exits.
    """

    def __init__(
        self, timeout: float | None, *, on_failure: Callable[[str], None] | None = None
    ) -> None:
        self.timeout = math.inf if timeout is None else timeout
        self.silence = min(self.timeout, MAX_SILENCE)
        self._on_failure = on_failure
        self._state, self._progress, self._doing = ALIVE, 0, "the start"
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def mark(self, doing: str) -> None:
        """Report that this rank now is at `doing` ("step 12")."""
        self._progress += 1
        self._doing = doing

    def start(self) -> None:
        """Begin to watch. Every rank must call this after init_process_group;
        further calls change nothing."""
        self.mark("the start")
        if self.timeout == math.inf or dist.get_world_size() == 1 or self._thread is not None:
            return
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = _own_store(self.rank, self.silence)
        self._state = ALIVE
        self._stop.clear()
        self._write(0)
        self._thread = threading.Thread(target=self._watch, name="flashtrain-watchdog", daemon=True)
        self._thread.start()

    def stop(self, failure: str | None = None) -> None:
        """Stop watching, so that other ranks expect no more heartbeats of this rank. With
        `failure`, what went wrong here, the other ranks print it with this rank and exit."""
        if self._thread is None:
            return
        self._state, self._doing = (GONE, self._doing) if failure is None else (FAILED, failure)
        self._stop.set()
        self._thread.join(self.silence)
        self._thread = None
        # Which holds the store: it must not be gone before the others have read and written.
        if self.rank == 0:
            self._outstay(3 * self.silence / BEATS if failure is not None else self.silence)

    def await_verdict(self) -> None:
        """After a broken collective, wait until the watchdog knows which rank is at fault,
        and ends this process."""
        if self._thread is not None:
            self._thread.join(2 * self.silence + GRACE)

    def _watch(self) -> None:
        record = Record(self.size, self.silence, self.timeout, time.monotonic())
        beats = 0
        message: str | None = None
        while message is None:
            ending = self._stop.wait(self.silence / BEATS)
            beats += 1
            try:
                self._write(beats)
                if ending:
                    return
                for rank in range(self.size):
                    record.note(rank, self._read(rank), time.monotonic())
                message = self._agreed(record.verdict(time.monotonic()))
            except (RuntimeError, OSError):  # what the store's client raises when its host is gone
                if self._stop.is_set() or record.latest[0].state == GONE:
                    return
                message = record.failure(0)
        end_job(message, self._on_failure)

    def _write(self, beats: int) -> None:
        beat = Beat(self._state, beats, self._progress, self._doing)
        self._store.set(str(self.rank), json.dumps(beat))

    def _read(self, rank: int) -> Beat:
        if self._store.check([str(rank)]):
            return Beat(*json.loads(self._store.get(str(rank))))
        return Beat()

    def _agreed(self, message: str | None) -> str | None:
        """Return the message of the rank that first found a problem, so that all ranks print the
        same; None while no rank has found one."""
        if message is None and not self._store.check([VERDICT]):
            return None
        first = self._store.compare_set(VERDICT, "", message or "").decode()
        if self.rank == 0:
            self._outstay(3 * self.silence / BEATS)
        return first

    def _outstay(self, seconds: float) -> None:
        """Wait until no other rank watches any longer, at most `seconds`: the store of this
        process must stay until the others have read it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(
            self._read(rank).state == ALIVE for rank in range(1, self.size)
        ):
            time.sleep(self.silence / BEATS / 4)


def _own_store(rank: int, silence: float) -> dist.TCPStore:
    """Make a store on rank 0's machine for the watchdogs alone: in training's store their threads
    would wait whenever training does."""
    host = os.environ["MASTER_ADDR"]
    options: dict[str, Any] = {"wait_for_workers": False, "timeout": timedelta(seconds=silence)}
    store = dist.TCPStore(host, 0, is_master=True, **options) if rank == 0 else None
    port = [store.port if store is not None else 0]
    dist.broadcast_object_list(port, src=0)
    return store or dist.TCPStore(host, port[0], is_master=False, **options)
