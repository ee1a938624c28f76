"""How long something takes that several ranks do together: each tells its own time, the slowest counts."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from flashtrain_recipes.context_benchmark.ranks import Team

_CLOCK_HZ = 2.0e9  # no GPU's multiprocessors run faster for long
_LONGEST_PAUSE = 0.1


class TeamClock:
    """All ranks of a team call each method at the same point.

    On GPUs the time is that between two events of this rank's queue. Before the first, the queue pauses for as long as
    the processor needs to fill it, and meets the other ranks': neither launching nor waiting for a late start is timed.
    On a CPU it is wall-clock time after a barrier.
    """

    def __init__(self, team: Team) -> None:
        self.team = team
        self.device = team.device
        self.on_gpu = team.device.type == "cuda"

    def seconds(self, launch: Callable[[], object]) -> float:
        """From the program's side, without waiting for a GPU: the longest of all ranks."""
        began = time.perf_counter()
        launch()
        return max(self.team.gather(time.perf_counter() - began))

    def milliseconds(self, launch: Callable[[], object], host_seconds: float) -> float:
        """This rank's time of one launch. host_seconds: of launching, the same on all ranks."""
        if not self.on_gpu:
            self.team.meet()
            began = time.perf_counter()
            launch()
            return (time.perf_counter() - began) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.team.meet()
        torch.cuda.synchronize(self.device)
        torch.cuda._sleep(int(min(1.5 * host_seconds + 1e-4, _LONGEST_PAUSE) * _CLOCK_HZ))
        self.team.meet()
        start.record()
        launch()
        end.record()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end)

    def peak_gib(self, call: Callable[[], object]) -> float | None:
        """The most memory that the call held on this rank beyond what was held before; None on a CPU."""
        if not self.on_gpu:
            call()
            return None
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        call()
        torch.cuda.synchronize(self.device)
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**30

    def settle(self) -> None:
        """Give cached memory back; raises what a failed kernel has left."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
