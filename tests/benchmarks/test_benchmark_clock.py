"""Timing: how launches become a sample, on a CPU and, with a made-up torch.cuda, on a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from flashtrain_recipes.benchmark_runner.measuring import CpuClock, GpuClock, Pace, clock_for


class FakeGpu:
    """Stands in for torch.cuda: a clock that launches and pauses push forward, and a log of what was asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.log, self.allocated, self.peak = 0.0, [], 100 * 2**20, 0
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

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep, raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self.log.append("wait"))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def sleep(self, cycles: int) -> None:
        self.now += cycles / 2.0e9
        self.log.append("pause")

    def launch(self) -> None:
        self.now += 0.002
        self.log.append("launch")

    def call(self) -> None:
        self.peak = self.allocated + 7 * 2**20


def test_a_cpu_sample_is_the_mean_of_launches_that_take_turns() -> None:
    calls: list[str] = []
    launches = [lambda: calls.append("a"), lambda: (calls.append("b"), time.sleep(0.002))]
    milliseconds = CpuClock().sample(launches, Pace(4, 0.0))
    assert calls == ["a", "b", "a", "b"]
    assert milliseconds >= 1.0


def test_a_cpu_knows_no_memory_and_no_second_clock() -> None:
    clock = clock_for(torch.device("cpu"))
    assert clock.peak_mib(lambda: None) is None
    assert clock.host_sample([lambda: None], Pace(1, 0.0)) is None


@pytest.mark.parametrize(("seconds", "launches"), [(0.02, 1), (0.001, 10), (1e-6, 50)])
def test_the_number_of_launches_fills_a_hundredth_of_a_second(monkeypatch, seconds, launches) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert CpuClock().pace([lambda: now.append(now.pop() + seconds)]).launches == launches


def test_a_gpu_sample_pauses_first_and_times_the_launches_alone(monkeypatch) -> None:
    gpu = FakeGpu(monkeypatch)
    clock = GpuClock(torch.device("cuda"))
    assert clock.sample([gpu.launch], Pace(3, 0.001)) == pytest.approx(2.0)
    assert gpu.log == ["pause", "event", "launch", "launch", "launch", "event", "wait"]
    assert clock.cache_bytes == 50 * 2**20


def test_a_gpus_pace_comes_from_a_few_launches_after_one_to_warm_up(monkeypatch) -> None:
    gpu = FakeGpu(monkeypatch)
    pace = GpuClock(torch.device("cuda")).pace([gpu.launch])
    assert gpu.log.count("launch") == 4
    assert pace.launches == 50
    assert 0 <= pace.host_seconds < 0.01


def test_memory_is_what_a_call_holds_beyond_what_was_held(monkeypatch) -> None:
    gpu = FakeGpu(monkeypatch)
    assert GpuClock(torch.device("cuda")).peak_mib(gpu.call) == 7.0
