"""How launches become a sample, on a CPU and, with a made-up torch.cuda, on a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from flashtrain_recipes.harness.clock import Clock, GpuClock, Pace


class FakeGpu:
    """Stands in for torch.cuda: a clock that launches and pauses push forward, and a log
    of what was asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.log, self.allocated, self.peak = 0.0, [], 100 * 2**20, 0
        self.host = 0.0  # the processor's clock, by which a launch takes 10 us
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.now
                gpu.log.append("event")

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) * 1e3

        class Properties:
            L2_cache_size = 50 * 2**20

        monkeypatch.setattr(time, "perf_counter", lambda: self.host)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep, raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self.log.append("wait"))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
        # There is no device.
        monkeypatch.setattr(torch, "ones", lambda *size, device: torch.zeros(size))
        self.clock = GpuClock(torch.device("cuda"))

    def sleep(self, cycles: int) -> None:
        self.now += cycles / 2.0e9
        self.log.append("pause")

    def launch(self) -> None:
        self.now += 0.002
        self.host += 1e-5
        self.log.append("launch")

    def call(self) -> None:
        self.peak = self.allocated + 7 * 2**20


def test_a_cpu_sample_is_the_mean_of_launches_that_take_turns() -> None:
    calls: list[str] = []
    launches = [lambda: calls.append("a"), lambda: (calls.append("b"), time.sleep(0.002))]
    took = Clock().queued(launches, Pace(4))
    assert calls == ["a", "b", "a", "b"]
    assert took.milliseconds >= 1.0
    assert took.host_us == took.milliseconds * 1e3


@pytest.mark.parametrize(("seconds", "launches"), [(0.02, 1), (0.001, 10), (1e-6, 50)])
def test_the_number_of_launches_fills_a_hundredth_of_a_second(
    monkeypatch, seconds, launches
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert Clock().calibrate([lambda: now.append(now.pop() + seconds)]).launches == launches


def test_a_gpu_sample_pauses_first_and_times_the_launches_alone(monkeypatch) -> None:
    gpu = FakeGpu(monkeypatch)
    assert gpu.clock.queued([gpu.launch], Pace(3, 0.001)).milliseconds == pytest.approx(2.0)
    assert gpu.log == ["pause", "event", "launch", "launch", "launch", "event", "wait"]
    assert gpu.clock.cache_bytes == 50 * 2**20


def test_a_call_by_itself_finds_an_idle_gpu_and_its_launching_counts(monkeypatch) -> None:
    gpu = FakeGpu(monkeypatch)
    took = gpu.clock.called([gpu.launch], Pace(2, 0.001))
    assert gpu.log == ["wait", "event", "launch", "event", "wait"] * 2
    assert took.milliseconds == pytest.approx(2.0)
    assert took.host_us == pytest.approx(10)


def test_a_programs_side_is_the_time_until_all_launches_are_done(monkeypatch) -> None:
    gpu = FakeGpu(monkeypatch)
    assert gpu.clock.waited([gpu.launch], 3) == pytest.approx(0.01)
    assert gpu.log == ["wait", "launch", "launch", "launch", "wait"]


def test_memory_is_what_a_call_holds_beyond_what_was_held(monkeypatch) -> None:
    gpu = FakeGpu(monkeypatch)
    assert gpu.clock.peak_mib(gpu.call) == 7.0
    assert gpu.clock.allocated_mib() == 100.0
