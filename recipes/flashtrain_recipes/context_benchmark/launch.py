"""The cases of a degree, gone through by ranks that this process starts, or that torchrun started, together.

When one fails while the others wait for it, all are started anew, without what it computed: nothing else is certain to
end their waiting.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from flashtrain_recipes.context_benchmark.cases import ContextCase
from flashtrain_recipes.context_benchmark.ranks import Team, begin
from flashtrain_recipes.context_benchmark.turns import ContextTurns
from flashtrain_recipes.harness.clock import clock_for
from flashtrain_recipes.harness.processes import RankFailed, in_ranks
from flashtrain_recipes.harness.rows import FAILED, OUT_OF_MEMORY
from flashtrain_recipes.harness.settings import BenchmarkSettings
from flashtrain_recipes.harness.turns import Effort


class Event(NamedTuple):
    """What is found of a case, by its number. kind: "begun", "failed" (where), "measured" (rows, [(title, reason)])."""

    kind: str
    number: int
    content: Any = None


@dataclass(frozen=True)
class Job:
    """What every rank is given. kind: "cuda" or "cpu". todo: cases of one degree, by number, of `count` in all.

    until: the first rank's moment of time.monotonic() after which no case is begun. failed: what failed at the first of
    them before, as ContextTurns has it.
    """

    options: BenchmarkSettings
    kind: str
    todo: dict[int, ContextCase]
    baselines: Sequence[Any]
    seed: int
    count: int
    until: float
    failed: dict[str, tuple[str, str | None]] = field(default_factory=dict)

    @property
    def degree(self) -> int:
        return next(iter(self.todo.values())).degree


def measured(job: Job, team: Team) -> Iterator[Event]:
    """Measure the cases; every rank goes through them, the first one's events have what was found."""
    clock, failed = clock_for(team.device, team.meet), job.failed
    for number, case in job.todo.items():
        left = float(team.gather(job.until - time.monotonic())[0])
        if left <= 0 and number > 0:  # the first is measured, however long starting took
            return
        yield Event("begun", number)
        notes: list[tuple[str, str]] = []
        late = time.monotonic() + left / (job.count - number)
        turns = ContextTurns(
            case, team, job.options, failed, device=team.device, clock=clock, seed=job.seed + number,
            effort=Effort(job.options.rounds, late=late),
            note=lambda *note, notes=notes: notes.append(note),
        )  # fmt: skip
        rows, failed = turns.run(job.baselines), {}
        del turns
        yield Event("measured", number, (rows, notes))


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def joined(job: Job) -> Generator[Event, None, None]:
    """The events of a job of torchrun's, of which this process is a rank."""
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    yield from measured(job, begin(rank, job.degree, job.kind, local_rank=local, init_method="env://"))


def launched(job: Job) -> Generator[Event, None, None]:
    """The events of a job whose ranks are started here. Raises RankFailed; ranks are gone however this ends."""
    number = next(iter(job.todo))
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "ranks").as_uri()
        try:
            with closing(in_ranks(_rank, (job, meeting), job.degree)) as events:
                for event in events:
                    number = event.number
                    yield event
            return
        except RankFailed as error:
            failure = error.failure
            if not failure.title:  # it died, or failed before any case
                raise RankFailed(failure, f" at {job.todo[number]}") from error
    yield Event("failed", number, failure.trace)
    known = (OUT_OF_MEMORY, None) if failure.full else (FAILED, failure.line)
    before = job.failed if number == next(iter(job.todo)) else {}
    todo = {other: case for other, case in job.todo.items() if other >= number}
    yield from launched(replace(job, todo=todo, failed={**before, failure.title: known}))


def _rank(rank: int, send: Callable[[Event], None], job: Job, meeting: str) -> None:
    """meeting: the URI of a file that does not exist yet."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    team = begin(rank, job.degree, job.kind, local_rank=rank, init_method=meeting)
    for event in measured(job, team):
        if rank == 0:
            send(event)
    team.gather(None)
    dist.destroy_process_group()
