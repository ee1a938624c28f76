"""Time and memory of calls on a GPU or a CPU.

triton.testing.do_bench (3.7) does not serve here: it needs a GPU's driver also where a CPU is measured, spends seven
calls on each look (baselines take ten looks each, in turns, and some calls last minutes), counts the launching of
kernels shorter than their launch, and holds 256 MiB of its own while a case fills the memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

Launch = Callable[[], object]

_SAMPLE_SECONDS = 0.010  # launches of one sample go on for so long
_MAX_LAUNCHES = 50  # of one sample: below what a GPU's queue holds
_MAX_CALLS = 10  # of a sample in which each call is waited for
_CLOCK_HZ = 2.0e9  # no GPU's multiprocessors run faster for long: a pause of this many cycles lasts a second at least
_MAX_PAUSE = 0.1  # seconds


class Pace(NamedTuple):
    """How one baseline is sampled."""

    launches: int  # of a sample
    host_seconds: float = 0.0  # of the processor, a launch


class Timed(NamedTuple):
    """One sample."""

    milliseconds: float
    host_us: float  # microseconds of the processor a call, without waiting for the GPU; on a CPU all of it


class Clock:
    """Wall-clock time on a CPU, where a call returns when it is done; memory is not watched there.

    Launches that are given as a sequence are called one after the other, again and again.

    Args:
        meet: called before each sample, on the device's queue: where several devices begin together.
    """

    cache_bytes = 0  # of the device's last cache, which inputs must exceed to be read from memory

    def __init__(self, meet: Callable[[], object] = lambda: None) -> None:
        self.meet = meet

    def pace(self, launches: Sequence[Launch]) -> Pace:
        """Return how many launches make a sample, from a few of them after one to warm up."""
        launches[0]()
        self.check()
        few = 3
        began = time.perf_counter()
        host = _run(launches, few)
        self.check()
        seconds = (time.perf_counter() - began) / few
        return Pace(max(1, min(_MAX_LAUNCHES, round(_SAMPLE_SECONDS / max(seconds, 1e-9)))), host)

    def waited(self, launches: Sequence[Launch], count: int) -> float:
        """Return the milliseconds of a launch from the program's side, launching included.

        The mean of `count` launches that are waited for together: for training steps, and short calls that launching
        may dominate.
        """
        self.check()
        self.meet()
        began = time.perf_counter()
        _run(launches, count)
        self.check()
        return (time.perf_counter() - began) / count * 1e3

    def queued(self, launches: Sequence[Launch], pace: Pace) -> Timed:
        """Return the device's time with launching hidden, and the processor's: means of one sample."""
        milliseconds = self.waited(launches, pace.launches)
        return Timed(milliseconds, milliseconds * 1e3)

    def called(self, launches: Sequence[Launch], pace: Pace) -> Timed:
        """Return the time of each call by itself on an idle device, launching counted: medians of one sample."""
        return self.queued(launches, pace)

    def peak_mib(self, call: Launch) -> float | None:
        """Return the most memory that the call held beyond what was held before it, in MiB; None: unknown."""
        call()
        return None

    def held_mib(self) -> float | None:
        """Return the memory that tensors hold now, in MiB; None: unknown."""
        return None

    def check(self) -> None:
        """Wait for the device. Raises where a failed kernel has broken it: nothing more can be measured then."""

    def settle(self) -> None:
        """Wait for the device, and free cached memory for the next baseline."""


class GpuClock(Clock):
    """GPU time between two events around a batch of launches.

    The GPU is first made to pause for as long as the processor needs to queue the whole batch, so that what is timed
    is the GPU's work and not the launching of it.
    """

    def __init__(self, device: torch.device, meet: Callable[[], object] = lambda: None) -> None:
        super().__init__(meet)
        self.device = device
        self.cache_bytes = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 * 2**20))
        # The workspace that torch takes for cuBLAS at the first product (32 MiB on sm_90) belongs to no baseline.
        tile = torch.ones(16, 16, device=device)
        tile @ tile

    def queued(self, launches: Sequence[Launch], pace: Pace) -> Timed:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.meet()
        _pause_queue(pace.host_seconds * pace.launches)
        self.meet()
        start.record()
        host = _run(launches, pace.launches)
        end.record()
        self.check()
        return Timed(start.elapsed_time(end) / pace.launches, host * 1e6)

    def called(self, launches: Sequence[Launch], pace: Pace) -> Timed:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        took: list[Timed] = []
        for number in range(min(pace.launches, _MAX_CALLS)):
            self.check()
            start.record()
            host = _run([launches[number % len(launches)]], 1)
            end.record()
            self.check()
            took.append(Timed(start.elapsed_time(end), host * 1e6))
        return Timed(*(statistics.median(part) for part in zip(*took, strict=True)))

    def peak_mib(self, call: Launch) -> float | None:
        self.check()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        call()
        self.check()
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20

    def held_mib(self) -> float | None:
        self.check()
        return torch.cuda.memory_allocated(self.device) / 2**20

    def check(self) -> None:
        torch.cuda.synchronize(self.device)

    def settle(self) -> None:
        torch.cuda.empty_cache()
        self.check()


def clock_for(device: torch.device, meet: Callable[[], object] = lambda: None) -> Clock:
    """Return the clock of a device."""
    return GpuClock(device, meet) if device.type == "cuda" else Clock(meet)


def _pause_queue(host_seconds: float) -> None:
    """Let the current GPU's queue wait for longer than the processor needs to fill it."""
    torch.cuda._sleep(int(min(1.5 * host_seconds + 1e-4, _MAX_PAUSE) * _CLOCK_HZ))


def _run(launches: Sequence[Launch], count: int) -> float:
    """Seconds of the processor a launch."""
    began = time.perf_counter()
    for number in range(count):
        launches[number % len(launches)]()
    return (time.perf_counter() - began) / count
