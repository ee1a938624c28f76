"""The cases on all ranks at once, and the ranks, started by this process or by torchrun: their events, and one line
when one of them fails.

Each rank has a pipe to this process. When one fails, is killed or is stuck, the others are ended. When one runs out of
memory while the others wait for it, all are started anew after that case: nothing else is certain to end their waiting.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.multiprocessing

from flashtrain.announce import quieten
from flashtrain.distributed.context.watchdog import EXIT_CODE, Watchdog
from flashtrain.errors import RunFailed
from flashtrain_recipes.attention_benchmark.settings import BenchmarkSettings
from flashtrain_recipes.benchmark_runner.measuring import Event, Row, first_line
from flashtrain_recipes.context_benchmark.contenders import Contender, ContextCase, cases, our_contenders
from flashtrain_recipes.context_benchmark.measure import Measurement, RanOut
from flashtrain_recipes.context_benchmark.peers import peers
from flashtrain_recipes.context_benchmark.ranks import World, begin
from flashtrain_recipes.context_benchmark.rows import Rates, rates_of

START_METHOD = "spawn"  # CUDA allows no other
STUCK_SECONDS = 600.0  # without any rank coming further
_LAST_WORDS = 1.0  # seconds in which the others may tell, too, why they failed
_OWN_FAILURE, _OUT_OF_MEMORY, _FAILED, _EVENT = 1, "out of memory", "failed", "event"


@dataclass
class Job:
    """What every rank is given. kind: "cuda" or "cpu". until: the moment of time.time() after which no case is begun.

    first: number of the case to begin with. skipped: {case number: titles of contenders that ran out of memory there}.
    rates: what one device has reached in earlier cases.
    """

    asked: BenchmarkSettings
    kind: str
    size: int
    degrees: list[int]
    seed: int
    until: float | None = None
    first: int = 0
    skipped: dict[int, list[str]] = field(default_factory=dict)
    rates: Rates = field(default_factory=Rates)

    def cases(self) -> list[ContextCase]:
        return cases(self.asked, self.degrees)

    def divisions(self) -> dict[int, list[int]]:
        """{degree: the numbers of ranks that divide the heads, of cases for which the hybrid way is one}."""
        found: dict[int, set[int]] = {degree: set() for degree in self.degrees}
        for case in self.cases():
            shared = math.gcd(case.attention.heads, case.degree)
            found[case.degree] |= {shared} if 1 < shared < case.degree else set()
        return {degree: sorted(of) for degree, of in found.items()}

    def contenders(self) -> tuple[list[Contender], dict[str, str]]:
        """(those that can be had, {title of each that cannot: why})."""
        return choose_contenders(self.asked, self.kind)


def choose_contenders(asked: BenchmarkSettings, kind: str) -> tuple[list[Contender], dict[str, str]]:
    """(the contenders that benchmark.implementations, ways and layouts name, {way of each that is missing: why})."""
    everyone = [*our_contenders(asked.ways, asked.layouts), *peers()]
    chosen = [one for one in everyone if asked.implementations is None or one.name in asked.implementations]
    missing = {one.way: reason for one in chosen if (reason := one.missing(kind)) is not None}
    return [one for one in chosen if one.way not in missing], missing


def _keep(notes: dict[tuple[str, str], None], title: str, reason: str) -> None:
    notes[title, reason] = None


class OutOfMemoryAt(Exception):
    """A rank ran out of memory at a case (its number) with a contender (its title)."""

    def __init__(self, case: int, title: str, line: str) -> None:
        super().__init__(line)
        self.case, self.title = case, title


def measured(job: Job, world: World, mark: Callable[[str], None]) -> Iterator[Event]:
    """Measure the cases of the job; every rank goes through it, the first one's events tell what was found.

    mark: called with what this rank does now. Raises OutOfMemoryAt on the rank that ran out of memory.
    """
    contenders, _ = job.contenders()
    todo = job.cases()
    for number in range(job.first, len(todo)):
        now = time.time()
        share = None if job.until is None else (job.until - now) / (len(todo) - number)
        share = world.told_by_first(share)
        if share is not None and share <= 0 and number > 0:  # something is measured, however long starting took
            return
        team = world.teams.get(todo[number].degree)
        if team is None:
            continue
        if world.rank == 0:
            yield Event("case", number)
        notes: dict[tuple[str, str], None] = {}  # each once: a way is refused alike in every layout
        measurement = Measurement(
            todo[number], team, job.asked, seed=job.seed + number, mark=mark, rates=job.rates,
            note=partial(_keep, notes),
        )  # fmt: skip
        try:
            rows: list[Row] = measurement.run(contenders, job.skipped.get(number, ()), share)
        except RanOut as error:
            raise OutOfMemoryAt(number, error.title, f"{todo[number]}, {error}") from error
        del measurement
        if world.rank == 0:
            for note in notes:
                yield Event("note", number, note)
            yield Event("rows", number, rows)


class RankFailed(RunFailed):
    """A rank failed: one line that names it and the case. `trace`: where, of a rank that could say so."""

    def __init__(self, line: str, trace: str = "") -> None:
        super().__init__(line)
        self.trace = trace


class _Message(NamedTuple):
    kind: str
    rank: int
    moment: float
    told: Any


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def joined(job: Job) -> Generator[Event, None, None]:
    """The events of a job of torchrun's, of which this process is a rank; the first rank's alone yields any."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = begin(rank, size, job.kind, local_rank=int(os.environ.get("LOCAL_RANK", "0")), init_method="env://")
    watchdog = Watchdog(STUCK_SECONDS)
    doing = ["the start"]

    def mark(what: str) -> None:
        doing[0] = what
        watchdog.mark(what)

    try:
        world = World(device, job.divisions())
        watchdog.start()
        yield from measured(job, world, mark)
    except OutOfMemoryAt as error:
        line = f"rank {rank} of {size}: {error}; torchrun's ranks are not started anew: leave that case out"
        watchdog.stop(line)
        raise RankFailed(line) from error
    except Exception as error:
        line = f"rank {rank} of {size} failed at {doing[0]}: {first_line(error)}"
        watchdog.stop(line)
        raise RankFailed(line, traceback.format_exc()) from error
    watchdog.stop()


def launched(job: Job) -> Generator[Event, None, None]:
    """The events of a job whose ranks are started here. Raises RankFailed; ranks are gone however this ends."""
    rows: list[Row] = []
    while True:
        again = None
        with closing(_messages(job)) as messages:
            for message in messages:
                if message.kind == _OUT_OF_MEMORY:
                    again = message.told
                    break
                rows += message.told.told if message.told.kind == "rows" else []
                yield message.told
        if again is None:
            return
        case, title, rank = again
        yield Event("note", case, (title, f"out of memory on rank {rank}: all ranks are started anew"))
        skipped = {**job.skipped, case: [*job.skipped.get(case, []), title]}
        job = replace(job, first=case, skipped=skipped, rates=rates_of(rows, job.cases()))


def _messages(job: Job) -> Generator[_Message, None, None]:
    """What the ranks tell, until all have ended."""
    context: Any = torch.multiprocessing.get_context(START_METHOD)
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "ranks").as_uri()
        pipes, processes = [], []
        for rank in range(job.size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=rank_main, args=(rank, job, meeting, sender), daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            yield from _listen(job, pipes, processes)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _listen(job: Job, pipes: list[Connection], processes: list[Any]) -> Iterator[_Message]:
    where = "the start"
    todo = job.cases()
    while True:
        ended = [process for process in processes if process.exitcode is not None]
        wait([*pipes, *[process.sentinel for process in processes if process not in ended]], timeout=1)
        for message in _received(pipes):
            if message.kind == _FAILED:
                raise _blamed(job, where, message, pipes, processes)
            if message.kind == _EVENT and message.told.kind == "case":
                where = str(todo[message.told.case])
            yield message
        if any(process.exitcode not in (None, 0) for process in ended):
            raise _blamed(job, where, None, pipes, processes)
        if len(ended) == len(processes):
            return


def _received(pipes: list[Connection]) -> Iterator[_Message]:
    for pipe in list(pipes):
        with suppress(EOFError, OSError):
            while pipe.poll():
                yield pipe.recv()
            continue
        pipes.remove(pipe)


def _blamed(job: Job, where: str, first: _Message | None, pipes: list[Connection], processes: list[Any]) -> RankFailed:
    """Which rank is to blame: one that was killed, or the first that failed; those that waited for it fail later."""
    end = time.monotonic() + _LAST_WORDS
    failures = [] if first is None else [first]
    while time.monotonic() < end:
        failures += [message for message in _received(pipes) if message.kind == _FAILED]
        time.sleep(0.05)
    for rank, process in enumerate(processes):
        if process.exitcode is not None and process.exitcode < 0:
            name = signal.Signals(-process.exitcode).name
            return RankFailed(f"rank {rank} of {job.size} died ({name}) at {where}")
    if failures:
        blamed = min(failures, key=lambda message: message.moment)
        line, trace = blamed.told
        return RankFailed(line, trace)
    rank = next(rank for rank, process in enumerate(processes) if process.exitcode)
    return RankFailed(f"rank {rank} of {job.size} ended with status {processes[rank].exitcode} at {where}")


def rank_main(rank: int, job: Job, meeting: str, pipe: Connection) -> None:
    """A rank's process. meeting: the URI of a file that does not exist yet."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))  # Ctrl-C is the first process's business
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    quieten()

    def tell(kind: str, told: Any) -> None:
        pipe.send(_Message(kind, rank, time.time(), told))

    def stuck(line: str) -> None:
        tell(_FAILED, (line, ""))
        os._exit(EXIT_CODE)

    doing = ["the start"]
    try:
        device = begin(rank, job.size, job.kind, local_rank=rank, init_method=meeting)
        watchdog = Watchdog(STUCK_SECONDS, end=stuck)

        def mark(what: str) -> None:
            doing[0] = what
            watchdog.mark(what)

        world = World(device, job.divisions())
        watchdog.start()
        for event in measured(job, world, mark):
            tell(_EVENT, event)
        watchdog.stop()
        dist.barrier(group=world.control)
        dist.destroy_process_group()
    except OutOfMemoryAt as error:
        tell(_OUT_OF_MEMORY, (error.case, error.title, rank))
        time.sleep(STUCK_SECONDS)  # until this process is ended with the others: they may still wait for it
    except Exception as error:  # noqa: BLE001 - told in a line by the process that started this one
        line = f"rank {rank} of {job.size} failed at {doing[0]}: {first_line(error)}"
        tell(_FAILED, (line, traceback.format_exc()))
        os._exit(_OWN_FAILURE)


def _end_with(parent: int) -> None:
    """A rank must not outlive the process that started it, which may be killed: it would keep a GPU."""
    while os.getppid() == parent:
        time.sleep(_LAST_WORDS)
    os._exit(_OWN_FAILURE)
