"""What a rank of the benchmark is: its device, those that share the sequences with it, and how they time what they do
together: each measures its own time, the slowest counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flashtrain.distributed.context.exchange import ContextGroup
from flashtrain_recipes.harness.clock import pause_queue

_STUCK = timedelta(minutes=10)  # after which a rank that waits for the others fails


class Alone:
    """A device by itself."""

    rank, size = 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in their order."""
        return [value]

    def meet(self) -> None:
        """A barrier: for the device's queue, and on a CPU for the processes."""


class Team(Alone):
    """All ranks of the job, which share each sequence, as one of them sees them.

    group: for attention, over NCCL on GPUs; numbers and words go over gloo.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.group = ContextGroup()
        self.rank, self.size = self.group.rank, self.group.size
        self._control = dist.new_group(backend="gloo", timeout=_STUCK)
        self._token = torch.zeros(1, device=device)
        self.meet()  # communicators are made at their first use, and not within something that is timed

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._control)
        return found

    def meet(self) -> None:
        dist.all_reduce(self._token)


def begin(rank: int, size: int, kind: str, *, local_rank: int, init_method: str) -> Team:
    """Join the process group of all ranks, NCCL on GPUs and gloo on CPUs.

    On a CPU a rank has its share of the cores, also where it stands for one device.
    """
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size, timeout=_STUCK)
    return Team(torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu"))


def host_seconds(team: Alone, launch: Callable[[], object]) -> float:
    """Of launching, from the program's side, without waiting for a GPU: the longest of all ranks."""
    began = time.perf_counter()
    launch()
    return float(max(team.gather(time.perf_counter() - began)))


def milliseconds(team: Alone, launch: Callable[[], object], host: float) -> float:
    """This rank's time of one launch, which all ranks of the team begin at the same point.

    On GPUs the time is that between two events of this rank's queue. Before the first, the queue pauses for as long as
    the processor needs to fill it (host, the same on all ranks), and meets the other ranks': neither launching nor
    waiting for a late start is timed. On a CPU it is wall-clock time after a barrier.
    """
    team.meet()
    if team.device.type != "cuda":
        began = time.perf_counter()
        launch()
        return (time.perf_counter() - began) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(team.device)
    pause_queue(host)
    team.meet()
    start.record()
    launch()
    end.record()
    torch.cuda.synchronize(team.device)
    return start.elapsed_time(end)
