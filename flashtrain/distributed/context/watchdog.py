"""Ends the job when a rank has died or is stuck, with a line that names it.

Ranks that wait in a collective for one that never comes cannot tell which, and NCCL's own timeout names an operation,
not a rank. So a thread of each rank writes into a small store, every few seconds, that the rank lives and how far it
has come; and reads what the others wrote. Who no longer writes is dead; where nobody moves on, who is furthest behind
is stuck. Then every rank says so and exits.
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

from flashtrain.errors import UserError

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: trying again may work
BEATS = 10  # a timeout


class Beat(NamedTuple):
    """What a rank last wrote. beats: how often it wrote; progress: of its marks; doing: the latest mark."""

    beats: int
    progress: int
    doing: str


class Watchdog:
    """Watches all ranks of the job from `start` to `stop`; `mark` says that this one has come further.

    timeout: seconds after which a silent rank counts as dead, and a job in which no rank comes further as stuck: more
    than the longest time between two marks (a step, a checkpoint, an evaluation). end: what happens then, with the
    line; by default it is printed and the process exits at once, for a thread in a collective cannot be interrupted.
    """

    def __init__(self, timeout: float, *, end: Callable[[str], None] | None = None) -> None:
        if timeout <= 0:
            raise UserError(f"a watchdog timeout of {timeout:g} seconds. Possible: more than 0.")
        self.timeout = timeout
        self._end = end or _exit
        self._progress, self._doing = 0, "starting"
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def mark(self, doing: str) -> None:
        """This rank now does what `doing` says ("step 12")."""
        self._progress += 1
        self._doing = doing

    def start(self) -> None:
        """Begin to watch; every rank must call it, after init_process_group."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size == 1 or self._thread is not None:
            return
        self._store = _own_store(self.rank, self.timeout)
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, name="flashtrain-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer; the others then do not miss this rank."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(self.timeout)
        self._thread = None

    def _watch(self) -> None:
        count = 0
        latest: dict[int, Beat] = {}
        changed = dict.fromkeys(range(self.size), time.monotonic())
        moved = time.monotonic()
        while True:
            ending = self._stop.wait(self.timeout / BEATS)
            count += 1
            own = "gone" if ending else f"{count}|{self._progress}|{self._doing}"
            try:
                self._store.set(str(self.rank), own)
                if ending:
                    return
                found = {rank: self._read(rank) for rank in range(self.size)}
            except (RuntimeError, OSError):  # what a store raises when its host is gone
                self._finish(f"rank 0 of {self.size} has died: it no longer answers")
                return
            now = time.monotonic()
            for rank, beat in found.items():
                if beat != latest.get(rank):
                    if beat is None or rank not in latest or beat.progress != latest[rank].progress:
                        moved = now
                    changed[rank] = now
                    if beat is not None:
                        latest[rank] = beat
            message = self._verdict(found, changed, now, moved)
            if message is not None:
                self._finish(message)
                return

    def _read(self, rank: int) -> Beat | None:
        """None for a rank that has stopped watching, or has not begun."""
        if not self._store.check([str(rank)]):
            return None
        text = self._store.get(str(rank)).decode()
        if text == "gone":
            return None
        count, progress, doing = text.split("|", 2)
        return Beat(int(count), int(progress), doing)

    def _verdict(
        self, found: dict[int, Beat | None], changed: dict[int, float], now: float, moved: float
    ) -> str | None:
        watched = {rank: beat for rank, beat in found.items() if beat is not None}
        for rank, beat in watched.items():
            if now - changed[rank] > self.timeout:
                return f"rank {rank} of {self.size} has died: no sign of it for {self.timeout:g} s; last: {beat.doing}"
        if now - moved <= self.timeout:
            return None
        behind = min(beat.progress for beat in watched.values())
        stuck = [rank for rank, beat in watched.items() if beat.progress == behind]
        if len(stuck) == len(watched):
            return (
                f"no rank has come further for {self.timeout:g} s: all {len(stuck)} are at '{watched[stuck[0]].doing}'"
            )
        names = ", ".join(map(str, stuck))
        return (
            f"rank {names} of {self.size} is stuck at '{watched[stuck[0]].doing}': for {self.timeout:g} s no rank has "
            "come further, and the others wait for it"
        )

    def _finish(self, message: str) -> None:
        if not self._stop.is_set():
            self._end(message)


def _exit(message: str) -> None:
    print(f"flashtrain: {message}. The job ends.", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


def _own_store(rank: int, timeout: float) -> dist.TCPStore:
    """A store of the watchdogs' own on rank 0's machine: one that training waits in would make the threads wait too."""
    wait = timedelta(seconds=max(timeout, 60.0))
    address: list[tuple[str, int] | None] = [None]
    store = None
    if rank == 0:
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=wait)
        address = [(host, store.port)]
    dist.broadcast_object_list(address, src=0)
    if store is not None:
        return store
    if address[0] is None:
        raise RuntimeError("rank 0 sent no address")
    return dist.TCPStore(*address[0], is_master=False, wait_for_workers=False, timeout=wait)
