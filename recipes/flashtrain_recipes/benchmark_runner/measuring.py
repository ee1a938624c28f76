"""What measuring one case needs: the time it may take, whose turn it is, a clock on a GPU or a CPU, and an error in one
line. Nothing of Lightning: ranks that only compute import it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")
Launch = Callable[[], object]
Note = Callable[[str, str], None]  # told of what could not be measured: (title, reason)
Row = dict[str, Any]

OUT_OF_MEMORY = "out of memory"
FEWEST_ROUNDS = 3

# One sample: launches for this long, and not more than so many, which keeps them below what a GPU's queue holds.
_SAMPLE_SECONDS = 0.010
_MOST_LAUNCHES = 50
_MOST_CALLS = 10  # of a sample in which each call is waited for
_CLOCK_HZ = 2.0e9  # no GPU's multiprocessors run faster for long: a pause of this many cycles lasts a second at least
_LONGEST_PAUSE = 0.1


@dataclass(frozen=True)
class Effort:
    """How much is measured of a case. rounds: turns of each implementation; steps: of a turn, where that has several.

    seconds: the case's share of the time, after which no further round is begun; None: no limit. until: a moment of
    time.monotonic() after which nothing is begun at all; None: no limit.
    """

    rounds: int
    steps: int = 1
    seconds: float | None = None
    until: float | None = None

    def is_over(self, ahead: float = 0.0) -> bool:
        """Whether `until` is past, or will be in so many seconds."""
        return self.until is not None and time.monotonic() + ahead >= self.until

    def is_late(self, began: float) -> bool:
        """Whether a case that began at a moment of time.monotonic() has had its share, or the time is over."""
        return self.is_over() or (self.seconds is not None and time.monotonic() - began >= self.seconds)


class Event(NamedTuple):
    """What the runner is told. kind: "case" (begun), "note" (told: title and reason), "rows" (told: the case's)."""

    kind: str
    case: int
    told: Any = None


def in_turn(entries: Sequence[T], number: int) -> Iterator[T]:
    """The entries in the order of a round: who begins moves on by one a round."""
    for place in range(len(entries)):
        yield entries[(place + number) % len(entries)]


def first_line(error: Exception) -> str:
    """What an exception says, in one line of at most 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


@dataclass(frozen=True)
class Pace:
    """How one implementation is sampled. launches: a sample. host_seconds: what a launch costs the processor."""

    launches: int
    host_seconds: float


class Timed(NamedTuple):
    """One sample. host_us: microseconds of the processor a call, without waiting for the GPU; on a CPU all of it."""

    milliseconds: float
    host_us: float


class CpuClock:
    """Wall-clock time on a CPU, where a call returns when it is done."""

    cache_bytes = 0

    def pace(self, launches: Sequence[Launch]) -> Pace:
        """How many launches make a sample: of one call's time, after a call to warm up."""
        launches[0]()
        seconds = self.sample(launches, Pace(1, 0.0)) / 1e3
        return Pace(_launches_for(seconds), 0.0)

    def sample(self, launches: Sequence[Launch], pace: Pace) -> float:
        """Milliseconds of a launch, the mean of one sample; the launches take turns."""
        began = time.perf_counter()
        for number in range(pace.launches):
            launches[number % len(launches)]()
        return (time.perf_counter() - began) / pace.launches * 1e3

    def queued(self, launches: Sequence[Launch], pace: Pace) -> Timed:
        """`sample`: a CPU has no queue."""
        milliseconds = self.sample(launches, pace)
        return Timed(milliseconds, milliseconds * 1e3)

    called = queued

    def host_sample(self, launches: Sequence[Launch], pace: Pace) -> float | None:
        """None: there is no second clock here."""
        return None

    def peak_mib(self, call: Launch) -> float | None:
        """None: the memory of calls on a CPU is not watched."""
        call()
        return None

    def steps(self, step: Launch, count: int) -> float:
        """Milliseconds of a step, the mean of `count` one after another."""
        return self.sample([step], Pace(count, 0.0))

    def held_mib(self) -> float | None:
        """None: the memory held on a CPU is not watched."""
        return None

    def check(self) -> None:
        """A CPU is always in order."""

    def release(self) -> None:
        """Nothing is held."""


class GpuClock:
    """GPU time between two events around a batch of launches.

    The GPU is first made to pause for as long as the processor needs to queue the whole batch, so that what is timed
    is the GPU's work and not the launching of it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cache_bytes = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 * 2**20))

    def pace(self, launches: Sequence[Launch]) -> Pace:
        """How many launches make a sample, from a few of them after one to warm up."""
        launches[0]()
        torch.cuda.synchronize(self.device)
        few = 3
        began = time.perf_counter()
        for number in range(few):
            launches[number % len(launches)]()
        host = (time.perf_counter() - began) / few
        torch.cuda.synchronize(self.device)
        seconds = (time.perf_counter() - began) / few
        return Pace(_launches_for(seconds), host)

    def sample(self, launches: Sequence[Launch], pace: Pace) -> float:
        """Milliseconds of GPU time a launch, the mean of one sample; the launches take turns."""
        return self.queued(launches, pace).milliseconds

    def queued(self, launches: Sequence[Launch], pace: Pace) -> Timed:
        """The GPU's time, launching hidden, and the processor's, which waits for nothing: means of one sample."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        pause_queue(pace.host_seconds * pace.launches)
        start.record()
        began = time.perf_counter()
        for number in range(pace.launches):
            launches[number % len(launches)]()
        host = time.perf_counter() - began
        end.record()
        torch.cuda.synchronize(self.device)
        return Timed(start.elapsed_time(end) / pace.launches, host / pace.launches * 1e6)

    def called(self, launches: Sequence[Launch], pace: Pace) -> Timed:
        """As a program calls it: events around each call on an idle GPU, launching counted; medians of one sample."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        took: list[Timed] = []
        for number in range(min(pace.launches, _MOST_CALLS)):
            torch.cuda.synchronize(self.device)
            start.record()
            began = time.perf_counter()
            launches[number % len(launches)]()
            host = time.perf_counter() - began
            end.record()
            torch.cuda.synchronize(self.device)
            took.append(Timed(start.elapsed_time(end), host * 1e6))
        return Timed(*(statistics.median(part) for part in zip(*took, strict=True)))

    def host_sample(self, launches: Sequence[Launch], pace: Pace) -> float:
        """Milliseconds a launch from the program's side, launching included: one after another, then waited for."""
        torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        for number in range(pace.launches):
            launches[number % len(launches)]()
        torch.cuda.synchronize(self.device)
        return (time.perf_counter() - began) / pace.launches * 1e3

    def peak_mib(self, call: Launch) -> float | None:
        """The most memory that the call held at any moment, beyond what was held before it, in MiB."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        call()
        torch.cuda.synchronize(self.device)
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20

    def steps(self, step: Launch, count: int) -> float:
        """Milliseconds of a step from the program's side, launching included: the mean of `count`, then waited for."""
        return self.host_sample([step], Pace(count, 0.0))

    def held_mib(self) -> float:
        """The memory that tensors hold now, in MiB."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.memory_allocated(self.device) / 2**20

    def check(self) -> None:
        """Raise what is left where a failed kernel has broken the GPU's context: nothing more can be measured."""
        torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give cached memory back, so that the next implementation finds all of it."""
        torch.cuda.empty_cache()


Clock = CpuClock | GpuClock


def pause_queue(host_seconds: float) -> None:
    """Let the current GPU's queue wait for longer than the processor needs to fill it, which takes so many seconds."""
    torch.cuda._sleep(int(min(1.5 * host_seconds + 1e-4, _LONGEST_PAUSE) * _CLOCK_HZ))


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    if device.type != "cuda":
        return CpuClock()
    # The workspace that torch takes for cuBLAS at the first product (32 MiB on sm_90) belongs to no implementation.
    tile = torch.ones(16, 16, device=device)
    tile @ tile
    return GpuClock(device)


def _launches_for(seconds: float) -> int:
    return max(1, min(_MOST_LAUNCHES, round(_SAMPLE_SECONDS / max(seconds, 1e-9))))
