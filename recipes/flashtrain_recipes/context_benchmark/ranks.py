"""What a rank of the benchmark is: its device, for every degree the ranks that share a sequence, and how they time what
they do together: each tells its own time, the slowest counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flashtrain.distributed.context.exchange import ContextGroup
from flashtrain_recipes.benchmark_runner.measuring import clock_for, pause_queue

# Ranks above a case's degree wait for the others as long as these measure; the watchdog ends a job that is stuck.
_PATIENCE = timedelta(hours=12)


class Team:
    """The first `degree` ranks, which share the sequences of cases of that degree. Seen from one of them.

    group: for attention, over NCCL on GPUs. control: over gloo, for numbers and words.
    """

    def __init__(self, group: Any, control: Any, device: torch.device, parts: Mapping[int, tuple[Any, Any]]) -> None:
        self.group = ContextGroup(group, parts)
        self.control = control
        self.device = device
        self.rank, self.size = self.group.rank, self.group.size
        self._token = torch.zeros(1, device=device)
        self.meet()  # communicators are made at their first use, and not within something that is timed

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in their order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.control)
        return found

    def meet(self) -> None:
        """A barrier: for the device's queue, and on a CPU for the processes."""
        dist.all_reduce(self._token, group=self.group.group)


class World:
    """All ranks of the benchmark, as one of them sees them. Made by all of them at the same point.

    degrees: {degree: the numbers of ranks, for hybrid ways, that divide the heads of a team of it}.
    """

    def __init__(self, device: torch.device, degrees: Mapping[int, Iterable[int]]) -> None:
        self.device = device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.control = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self.teams: dict[int, Team] = {}
        for degree, divisions in degrees.items():
            # Every rank makes every group, also those that it is no part of.
            members = list(range(degree))
            group = dist.group.WORLD if degree == self.size else dist.new_group(members, timeout=_PATIENCE)
            control = dist.new_group(members, backend="gloo", timeout=_PATIENCE)
            parts = {divided: self._parts(degree, divided) for divided in divisions}
            if self.rank < degree:
                self.teams[degree] = Team(group, control, device, parts)

    def _parts(self, degree: int, divided: int) -> tuple[Any, Any]:
        """This rank's (heads, ring) of a team, as ContextGroup divides it; what it is no part of is None."""
        rings = degree // divided
        heads = [list(range(ring * divided, (ring + 1) * divided)) for ring in range(rings)]
        around = [list(range(place, degree, divided)) for place in range(divided)]
        return self._own(heads), self._own(around)

    def _own(self, groups: list[list[int]]) -> Any:
        made = {tuple(ranks): dist.new_group(ranks, timeout=_PATIENCE) for ranks in groups}
        return next((group for ranks, group in made.items() if self.rank in ranks), None)

    def told_by_first(self, value: Any) -> Any:
        """The first rank's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control, device=torch.device("cpu"))
        return box[0]


def begin(rank: int, size: int, kind: str, *, local_rank: int, init_method: str) -> torch.device:
    """Join the process group of all ranks, NCCL on GPUs and gloo on CPUs; the device of this rank.

    On a CPU a rank has its share of the cores, also where it stands for one device.
    """
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", init_method=init_method, rank=rank, world_size=size, timeout=_PATIENCE
    )
    return torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")


class TeamClock:
    """All ranks of a team call each method at the same point.

    On GPUs the time is that between two events of this rank's queue. Before the first, the queue pauses for as long as
    the processor needs to fill it, and meets the other ranks': neither launching nor waiting for a late start is timed.
    On a CPU it is wall-clock time after a barrier.
    """

    def __init__(self, team: Team) -> None:
        self.team, self.device = team, team.device
        self.own = clock_for(team.device)

    def seconds(self, launch: Callable[[], object]) -> float:
        """From the program's side, without waiting for a GPU: the longest of all ranks."""
        began = time.perf_counter()
        launch()
        return max(self.team.gather(time.perf_counter() - began))

    def milliseconds(self, launch: Callable[[], object], host_seconds: float) -> float:
        """This rank's time of one launch. host_seconds: of launching, the same on all ranks."""
        if self.device.type != "cuda":
            self.team.meet()
            began = time.perf_counter()
            launch()
            return (time.perf_counter() - began) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.team.meet()
        torch.cuda.synchronize(self.device)
        pause_queue(host_seconds)
        self.team.meet()
        start.record()
        launch()
        end.record()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end)

    def peak_gib(self, call: Callable[[], object]) -> float | None:
        """The most memory that the call held on this rank beyond what was held before; None on a CPU."""
        peak = self.own.peak_mib(call)
        return None if peak is None else peak / 1024

    def settle(self) -> None:
        """Give cached memory back; raises what a failed kernel has left."""
        self.own.check()
        self.own.release()
