"""Time and memory of calls on a GPU or a CPU.

triton.testing.do_bench (3.7) is not used: it needs a GPU's driver even to measure a CPU, makes
seven extra calls for each sample (a baseline has ten samples, and some calls last minutes),
counts launching for kernels shorter than their launch, and holds 256 MiB of its own while a
case fills the memory.
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
# No GPU's multiprocessors run faster for long: a pause of this many cycles lasts a second at least.
_CLOCK_HZ = 2.0e9
_MAX_PAUSE = 0.1  # seconds


class Pace(NamedTuple):
    """How many launches one sample has, and the processor time that one launch takes."""

    launches: int  # in one sample
    host_seconds: float = 0.0  # processor time of one launch


class Timed(NamedTuple):
    """The time of one launch on the device and on the processor, as one sample measured them."""

    milliseconds: float
    # Processor time in microseconds, without waiting for the GPU; on a CPU the whole time.
    host_us: float


class Clock:
    """Times calls on a CPU by wall clock, where a call returns when its work is done.
    Memory is not measured.

    Methods that take `launches` call them from first to last, again and again.

    Args:
        barrier: called before each sample; where several devices are timed together,
            it waits for the others.
    """

    # Size of the device's last-level cache, which inputs must exceed to be read from memory.
    cache_bytes = 0

    def __init__(self, barrier: Callable[[], object] = lambda: None) -> None:
        self.barrier = barrier

    def calibrate(self, launches: Sequence[Launch]) -> Pace:
        """Return the Pace of samples of about 10 ms, estimated from three launches after one to
        warm up."""
        launches[0]()
        self.check()
        few = 3
        began = time.perf_counter()
        host = _run(launches, few)
        self.check()
        seconds = (time.perf_counter() - began) / few
        return Pace(max(1, min(_MAX_LAUNCHES, round(_SAMPLE_SECONDS / max(seconds, 1e-9)))), host)

    def waited(self, launches: Sequence[Launch], count: int) -> float:
        """Return the milliseconds of one launch by wall clock, launching included: the
        mean of `count` launches.

        The device is waited for once, after the last launch. Use this for training steps, and for
        short calls, whose launching may take longer than their computation.
        """
        self.check()
        self.barrier()
        began = time.perf_counter()
        _run(launches, count)
        self.check()
        return (time.perf_counter() - began) / count * 1e3

    def queued(self, launches: Sequence[Launch], pace: Pace) -> Timed:
        """Time one sample with launching hidden, and return the device's and the processor's
        mean time of a launch."""
        milliseconds = self.waited(launches, pace.launches)
        return Timed(milliseconds, milliseconds * 1e3)

    def called(self, launches: Sequence[Launch], pace: Pace) -> Timed:
        """Time calls one by one on an idle GPU, launching included, and return their
        medians; on a CPU as `queued`."""
        return self.queued(launches, pace)

    def peak_mib(self, call: Launch) -> float | None:
        """Return the call's peak memory in MiB, beyond what was allocated before it;
        None where it is unknown."""
        call()
        return None

    def allocated_mib(self) -> float | None:
        """Return the memory that tensors occupy now, in MiB; None where it is unknown."""
        return None

    def check(self) -> None:
        """Wait until the device is done. Raises where a failed kernel left the GPU unusable."""

    def free_cache(self) -> None:
        """Wait for the device, and give unused cached memory back to it for the next baseline."""


class GpuClock(Clock):
    """Times a batch of launches on a GPU, between two CUDA events.

    The GPU first pauses for as long as the processor needs to queue the whole batch, so that the
    measured time is that of the GPU's work, without launching.
    """

    def __init__(self, device: torch.device, barrier: Callable[[], object] = lambda: None) -> None:
        super().__init__(barrier)
        self.device = device
        self.cache_bytes = int(
            getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 * 2**20)
        )
        # The workspace that torch takes for cuBLAS at the first product (32 MiB on sm_90)
        # belongs to no baseline.
        tile = torch.ones(16, 16, device=device)
        tile @ tile

    def queued(self, launches: Sequence[Launch], pace: Pace) -> Timed:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.barrier()
        # The queue waits for longer than the processor needs to fill it.
        pause = min(1.5 * pace.host_seconds * pace.launches + 1e-4, _MAX_PAUSE)
        torch.cuda._sleep(int(pause * _CLOCK_HZ))
        self.barrier()
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

    def allocated_mib(self) -> float | None:
        self.check()
        return torch.cuda.memory_allocated(self.device) / 2**20

    def check(self) -> None:
        torch.cuda.synchronize(self.device)

    def free_cache(self) -> None:
        torch.cuda.empty_cache()
        self.check()


def clock_for(device: torch.device, barrier: Callable[[], object] = lambda: None) -> Clock:
    """Return the clock for a device: GpuClock on CUDA, else Clock. `barrier` is
    the argument of Clock."""
    return GpuClock(device, barrier) if device.type == "cuda" else Clock(barrier)


def _run(launches: Sequence[Launch], count: int) -> float:
    """Call `count` launches without waiting for the device, and return the seconds that the
    processor took for one of them, on average."""
    began = time.perf_counter()
    for number in range(count):
        launches[number % len(launches)]()
    return (time.perf_counter() - began) / count
