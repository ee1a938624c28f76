"""One case measured by implementations made up for the purpose: taking turns, failing, and running out of time; and how
launches become a sample, on a CPU and, with a made-up torch.cuda, on a GPU.
"""

from __future__ import annotations

import time

import pytest
import torch

from flashtrain_recipes.attention_benchmark.cases import Case
from flashtrain_recipes.attention_benchmark.one_case import Measurement
from flashtrain_recipes.attention_benchmark.peers.base import Peer
from flashtrain_recipes.attention_benchmark.peers.pytorch import Standard
from flashtrain_recipes.benchmark_runner.measuring import CpuClock, Effort, GpuClock, Pace


class FakeGpu:
    """Stands in for torch.cuda: a clock that launches and pauses push forward, and a log of what was asked of it."""

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
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

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
    milliseconds = CpuClock().sample(launches, Pace(4, 0.0))
    assert calls == ["a", "b", "a", "b"]
    assert milliseconds >= 1.0


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


def test_a_call_by_itself_finds_an_idle_gpu_and_its_launching_counts(monkeypatch) -> None:
    gpu = FakeGpu(monkeypatch)
    took = GpuClock(torch.device("cuda")).called([gpu.launch], Pace(2, 0.001))
    assert gpu.log == ["wait", "event", "launch", "event", "wait"] * 2
    assert took.milliseconds == pytest.approx(2.0)
    assert took.host_us == pytest.approx(10)


def test_memory_is_what_a_call_holds_beyond_what_was_held(monkeypatch) -> None:
    gpu = FakeGpu(monkeypatch)
    assert GpuClock(torch.device("cuda")).peak_mib(gpu.call) == 7.0


CASE = Case(2, 2, 32, 16, "causal", dtype_name="float32")
CPU = torch.device("cpu")
ROW_KEYS = {
    "implementation", "direction", "batch", "seqlen_q", "seqlen_k", "heads", "kv_heads", "head_dim", "mask", "dropout",
    "dtype", "milliseconds", "host_us", "tflops", "peak_memory_mib", "error",
}  # fmt: skip


class Named(Standard):
    """Standard attention under another title, which writes down when it is called."""

    def __init__(self, title: str, calls: list[str] | None = None) -> None:
        self.name = self.title = title
        self.calls = calls if calls is not None else []

    def attend(self, case, context):
        inner = super().attend(case, context)

        def attention(inputs):
            self.calls.append(self.title)
            return inner(inputs)

        return attention


class Failing(Named):
    """Raises an error in its forward or in its backward pass."""

    def __init__(self, title: str, error: Exception, direction: str) -> None:
        super().__init__(title)
        self.error, self.direction = error, direction

    def attend(self, case, context):
        inner = super().attend(case, context)

        def attention(inputs):
            if self.direction == "forward":
                raise self.error
            out = inner(inputs)
            out.register_hook(self._raise)
            return out

        return attention

    def _raise(self, _):
        raise self.error


class Picky(Named):
    def refuses(self, case: Case) -> str | None:
        return "no causal mask"


class OneSample(CpuClock):
    """A clock that counts samples instead of taking time."""

    def pace(self, launches):
        launches[0]()
        return Pace(1, 0.0)

    def sample(self, launches, pace):
        launches[0]()
        return 2.0

    def peak_mib(self, call):
        call()
        return 3.0


def measure(peers: list[Peer], rounds: int = 3, case: Case = CASE, directions=("forward", "backward"), **effort):
    notes: list[tuple[str, str]] = []
    one = Measurement(
        case, CPU, OneSample(), seed=0, directions=directions, note=lambda title, reason: notes.append((title, reason))
    )
    return one.run(peers, Effort(rounds, **effort)), notes


def test_each_implementation_has_a_row_a_direction_with_every_column() -> None:
    rows, notes = measure([Named("a"), Named("b")])
    assert [(row["implementation"], row["direction"]) for row in rows] == [
        ("a", "forward"), ("a", "backward"), ("b", "forward"), ("b", "backward")
    ]  # fmt: skip
    assert all(set(row) == ROW_KEYS for row in rows)
    assert notes == []
    pairs = 32 * 32 / 2
    assert rows[0]["tflops"] == pytest.approx(4 * 2 * 2 * pairs * 16 / 2e-3 / 1e12, abs=5e-4)
    assert rows[0]["milliseconds"] == 2.0
    assert rows[0]["host_us"] == 2000.0
    assert rows[0]["peak_memory_mib"] == 3.0
    assert all(row["error"] < 1e-5 for row in rows)


def test_implementations_take_turns_and_the_first_moves_on() -> None:
    calls: list[str] = []
    peers = [Named("a", calls), Named("b", calls), Named("c", calls)]
    measure(peers, rounds=3, directions=("forward",))
    assert "".join(calls)[-9:] == "abcbcacab"


def test_one_that_fails_gives_a_line_and_the_others_go_on() -> None:
    error = ValueError("head_dim 16 is\nnot supported")
    rows, notes = measure([Failing("bad", error, "forward"), Named("good")])
    assert {row["implementation"] for row in rows} == {"good"}
    assert notes == [("bad", "forward: ValueError: head_dim 16 is")]


def test_one_whose_backward_fails_keeps_its_forward() -> None:
    rows, notes = measure([Failing("half", RuntimeError("no backward"), "backward")])
    assert [(row["implementation"], row["direction"]) for row in rows] == [("half", "forward")]
    assert notes == [("half", "backward: RuntimeError: no backward")]


def test_out_of_memory_is_a_row_that_says_so() -> None:
    rows, notes = measure([Failing("big", torch.OutOfMemoryError("CUDA out of memory"), "forward"), Named("small")])
    (row,) = [row for row in rows if row["implementation"] == "big"]
    assert (row["direction"], row["status"], row["milliseconds"]) == ("forward", "out of memory", None)
    assert notes == [("big", "forward: out of memory")]


def test_rounds_end_with_the_cases_share_of_the_time_but_not_before_three() -> None:
    calls: list[str] = []
    measure([Named("a", calls)], rounds=50, directions=("forward",), seconds=0.0)
    first_calls = 4  # to try it, for the error, for the memory, for the pace
    assert len(calls) == first_calls + 3


def test_dropout_has_no_error_to_tell() -> None:
    rows, _ = measure([Named("a")], case=Case(1, 2, 32, 16, "full", dropout=0.5, dtype_name="float32"))
    assert [row["error"] for row in rows] == [None, None]


def test_a_mask_with_a_plan_gets_a_row_for_it() -> None:
    class Planning(Named):
        def plan(self, case, context):
            return lambda: None

    case = Case(1, 2, 64, 16, "prefix-lm", plans=True, dtype_name="float32")
    rows, _ = measure([Planning("a")], case=case)
    plan = next(row for row in rows if row["direction"] == "plan")
    assert (plan["milliseconds"], plan["tflops"], plan["error"]) == (2.0, None, None)
    assert 0.5 < plan["density"] < 0.6


def test_a_broken_gpu_ends_the_case() -> None:
    class Broken(OneSample):
        def check(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    one = Measurement(CASE, CPU, Broken(), seed=0, directions=("forward",), note=lambda *_: None)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        one.run([Failing("bad", RuntimeError("CUDA error"), "forward")], Effort(3))
