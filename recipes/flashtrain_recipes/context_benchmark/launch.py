"""The cases of one degree, measured one after another in the same processes, one for each rank.

When a rank fails, the others may wait for it forever: so all ranks are started anew, without the
baseline that failed at that case.
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

from flashtrain.folders.run_folder import FAILED, OUT_OF_MEMORY
from flashtrain_recipes.context_benchmark.cases import ContextCase
from flashtrain_recipes.context_benchmark.ranks import Team
from flashtrain_recipes.context_benchmark.turns import ContextTurns
from flashtrain_recipes.harness.clock import clock_for
from flashtrain_recipes.harness.processes import RankFailed, in_ranks
from flashtrain_recipes.harness.turns import Effort


class Event(NamedTuple):
    """A message from the ranks about one case."""

    kind: str  # "begun", "failed" or "measured"
    number: int  # of the case in the run
    content: Any = None  # of "failed" the traceback, of "measured" rows and [(title, reason)]


@dataclass(frozen=True)
class Job:
    """The work that every rank is given: the cases of one degree, the baselines and the limits."""

    options: Any  # the settings benchmark.*
    kind: str  # "cuda" or "cpu"
    todo: dict[int, ContextCase]  # by number, all of one degree
    baselines: Sequence[Any]
    seed: int
    count: int  # cases of the whole run
    until: float  # the first rank's time.monotonic() after which no case is begun
    # {title: (status, reason)} of the baselines that failed at the first case in an earlier start
    failed: dict[str, tuple[str, str | None]] = field(default_factory=dict)


def launched(job: Job) -> Generator[Event, None, None]:
    """Start the ranks of a job, and yield their events. When the generator ends, for any
    reason, no rank is left.

    Raises:
        RankFailed: a rank died, or had an error that no baseline caused. (A baseline's
            error becomes an event.)
    """
    number, case = next(iter(job.todo.items()))
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "ranks").as_uri()
        try:
            with closing(in_ranks(_rank, (job, meeting), case.degree)) as events:
                for event in events:
                    number = event.number
                    yield event
            return
        except RankFailed as error:
            failure = error.failure
            if not failure.title:
                raise RankFailed(failure, f" at {job.todo[number]}") from error
    yield Event("failed", number, failure.trace)
    known = (OUT_OF_MEMORY, None) if failure.full else (FAILED, failure.line)
    before = job.failed if job.todo[number] is case else {}
    todo = {other: case for other, case in job.todo.items() if other >= number}
    yield from launched(replace(job, todo=todo, failed={**before, failure.title: known}))


def _rank(rank: int, send: Callable[[Event], None], job: Job, meeting: str) -> None:
    size = next(iter(job.todo.values())).degree
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    team = Team(rank, size, job.kind, meeting)
    for event in _measured(job, team):
        if rank == 0:
            send(event)
    team.gather(None)
    dist.destroy_process_group()


def _measured(job: Job, team: Team) -> Iterator[Event]:
    clock, failed = clock_for(team.device, team.barrier), job.failed
    for number, case in job.todo.items():
        left = float(team.gather(job.until - time.monotonic())[0])
        if left <= 0 and number > 0:  # the first is measured, however long starting took
            return
        yield Event("begun", number)
        notes: list[tuple[str, str]] = []
        late = time.monotonic() + left / (job.count - number)
        turns = ContextTurns(
            case, team, job.options, failed, device=team.device, clock=clock,
            seed=job.seed + number,
            effort=Effort(job.options.rounds, late=late),
            note=lambda *note, notes=notes: notes.append(note),
        )  # fmt: skip
        rows, failed = turns.run(job.baselines), {}
        del turns
        yield Event("measured", number, (rows, notes))
