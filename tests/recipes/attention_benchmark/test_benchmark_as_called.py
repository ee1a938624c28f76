"""rows=as-called: each call by itself with its launching, features beside the plain call, a cache's rate; and what has
no figure is a row that says why.
"""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_benchmark_measure import CPU, Failing, Named, OneSample, Picky
from test_benchmark_run import run

from flashtrain.command.compose import compose_settings
from flashtrain.command.job import settle
from flashtrain.report import read_result
from flashtrain_recipes.attention_benchmark import cases as cases_module
from flashtrain_recipes.attention_benchmark import measure as benchmark_run
from flashtrain_recipes.attention_benchmark import warm
from flashtrain_recipes.attention_benchmark.cases import Case, cases, document_lengths
from flashtrain_recipes.attention_benchmark.one_case import Measurement
from flashtrain_recipes.attention_benchmark.peers import all_peers
from flashtrain_recipes.attention_benchmark.settings import AS_CALLED, IMPLEMENTATIONS, BenchmarkSettings
from flashtrain_recipes.benchmark_runner.measuring import Effort, Timed
from flashtrain_recipes.benchmark_runner.run import Run

PUBLISHED = cases(BenchmarkSettings(name="attention", rows="as-called"))
# The rows that a peer leads: batch, heads, length, head dimension
FIRST = {(32, 12, 1024, 64), (1, 16, 32768, 128), (64, 16, 512, 64), (64, 16, 256, 128), (32, 32, 512, 64),
         (1, 32, 32768, 64)}  # fmt: skip


def tiny(case: Case) -> Case:
    """A case of the preset, made small: what is called, and how, stays."""
    length = 1 if case.page is not None else 256 if case.is_varlen else 64
    return replace(
        case,
        batch=min(case.batch, 2),
        heads=4,
        kv_heads=4 if case.kv_heads == case.heads else 2,
        seqlen_q=length,
        seqlen_k=512 if case.page is not None else length,
        head_dim=case.head_dim // 8,
        beside=case.beside // 8,
        mask=case.mask.replace("1024", "9"),
        documents=document_lengths(length) if case.documents else (),
    )


class Called(OneSample):
    """A clock on which a call by itself takes longer than one in a queue, and more so the longer its heads are."""

    def called(self, launches, pace):
        out = launches[0]()
        return Timed(out.shape[-1] / 8 if isinstance(out, torch.Tensor) else 4.0, 30.0)


def measure(case: Case, *peers, **effort):
    notes: list[tuple[str, str]] = []
    one = Measurement(
        case, CPU, Called(), seed=0, directions=("forward", "backward"), as_called=True,
        note=lambda title, reason: notes.append((title, reason)),
    )  # fmt: skip
    return one.run(peers, Effort(3, **effort)), notes


# Besides those of every run here: no demo, and no choice among the rows.
WORDS = (
    "benchmark.rows=as-called", "benchmark.dtype=float32", "benchmark.seqlens=null", "benchmark.heads=null",
    "hardware.demo=never",
)  # fmt: skip
SMALL = Case(1, 2, 32, 16, "causal", dtype_name="float32")


def test_the_rows_that_a_peer_leads_come_first_and_no_case_comes_twice() -> None:
    assert {(c.batch, c.heads, c.seqlen_q, c.head_dim) for c in PUBLISHED[:6]} == FIRST
    assert len(set(PUBLISHED)) == len(PUBLISHED)
    assert all(set(c.documents) <= set(range(300, 6001)) for c in PUBLISHED if c.documents)
    assert {c.head_dim for c in PUBLISHED} == {64, 96, 128, 256}
    assert set(AS_CALLED) <= set(IMPLEMENTATIONS)


def test_a_row_has_the_calls_own_time_and_the_processors() -> None:
    rows, _ = measure(SMALL, Named("a"))
    assert [(row["part"], row["direction"], row["milliseconds"], row["host_us"]) for row in rows] == [
        ("calls", "forward", 2.0, 30.0), ("calls", "backward", 4.0, 30.0)
    ]  # fmt: skip


def test_a_feature_is_told_as_its_share_of_the_plain_calls_speed() -> None:
    rows, _ = measure(replace(SMALL, softcap=2.0, sinks=True, beside=16), Named("a"))
    assert {(row["features"], row["of_plain"]) for row in rows} == {("softcap 2, sinks", 1.0)}
    narrow, _ = measure(replace(SMALL, head_dim=8, beside=16), Named("a"))
    # half the work: forward in half of the time, backward, on this clock, in the same
    assert [row["of_plain"] for row in narrow] == [1.0, 0.5]
    assert {row["head_dim"] for row in narrow} == {8}


def test_decoding_has_no_backward_and_tells_what_of_the_cache_it_reads_in_a_second() -> None:
    (row,), _ = measure(Case(2, 4, 1, 16, "full", kv_heads=2, seqlen_k=512, page=0, dtype_name="float32"), Named("a"))
    assert (row["part"], row["cache"], row["gpu_milliseconds"]) == ("decoding", "contiguous", 2.0)
    assert row["gb_per_second"] == pytest.approx(2 * 2 * 512 * 2 * 16 * 4 / 2e-3 / 1e9, abs=1e-6)
    assert row["bandwidth_share"] == pytest.approx(row["gb_per_second"] / 4200, abs=1e-6)


def test_what_fails_is_a_row_with_its_reason_and_what_is_refused_a_note() -> None:
    half = Failing("half", RuntimeError("no backward"), "backward")
    whole = Failing("whole", ValueError("no sm_90"), "forward")
    rows, notes = measure(SMALL, half, whole, Picky("picky"), Named("good"))
    told = {(row["implementation"], row["direction"]): (row.get("status"), row["error"]) for row in rows}
    assert told["half", "backward"] == ("failed", "backward: RuntimeError: no backward")
    assert told["whole", "forward"] == told["whole", "backward"] == ("failed", "forward: ValueError: no sm_90")
    assert told["good", "backward"][0] is None
    assert ("picky", "no causal mask") in notes
    assert not any(name == "picky" for name, _ in told)


def test_what_broke_the_gpu_before_is_not_called_again() -> None:
    calls: list[str] = []
    bad = Named("bad", calls)
    one = Measurement(
        SMALL, CPU, Called(), seed=0, directions=("forward",), note=lambda *_: None, as_called=True
    )  # fmt: skip
    rows = one.run([bad, Named("good")], Effort(3), broken={(SMALL, "bad"): "an illegal memory access"})
    assert [(row["implementation"], row["error"]) for row in rows if row.get("status")] == [
        ("bad", "an illegal memory access")
    ]  # fmt: skip
    assert calls == []


class Queue(list):
    """What a process tells, kept in this one."""

    put = list.append


def test_each_case_is_called_once_in_both_directions_before(monkeypatch) -> None:
    calls: list[str] = []
    tasks = [(tiny(case), "a") for case in PUBLISHED[:4]]
    monkeypatch.setattr(warm, "all_peers", lambda _: [Named("a", calls)])
    monkeypatch.setattr(warm, "quieten", lambda: None)
    told = Queue()
    begun = multiprocessing.Value("i", 2)  # two tasks are other processes' already
    warm._work(1, [(replace(case, dtype_name="float32"), name) for case, name in tasks], begun, "cpu", told)
    assert [(one[0], one[1]) for one in told] == [(1, 2), (1, 3)]
    assert calls == ["a", "a"]
    cache = replace(tiny(next(c for c in PUBLISHED if c.page)), dtype_name="float32")
    warm.call_once(cache, all_peers("cpu")[0], CPU)


def test_on_a_gpu_all_that_is_compiled_is_called_before_and_never_for_more_than_half_of_the_time(
    monkeypatch, passing
) -> None:
    words = ["recipe=attention-benchmark", "benchmark.rows=as-called", "hardware=cpu", "hardware.demo=never"]
    one = benchmark_run.AttentionBenchmark(*settle(compose_settings(words), words))
    one.device = torch.device("cuda")
    monkeypatch.setattr(benchmark_run.Benchmark, "events", lambda *_: iter(()))
    seen: list = []
    monkeypatch.setattr(benchmark_run, "warm_up", lambda *given: seen.append(given) or {given[0][0]: "broke"})
    assert list(one.events(Run(Path(), "", (), [], time.monotonic() + 60))) == []
    ((tasks, device, seconds),) = seen
    assert tasks[:3] == [
        (PUBLISHED[0], "flashtrain"),
        (PUBLISHED[1], "flashtrain"),
        (PUBLISHED[1], "flashtrain-planned"),
    ]
    assert not any(name.startswith("sdpa") for _, name in tasks)
    assert (device, one.broken) == ("cuda", {tasks[0]: "broke"})
    assert seconds == 30


@pytest.mark.slow  # a process imports torch
def test_a_process_that_dies_names_what_it_called(monkeypatch) -> None:
    case = replace(SMALL, mask="full")
    assert warm.warm_up([(case, "flashtrain"), (case, "standard")], "cpu", 600, workers=1) == {}
    # a name that nobody knows ends the process, as a crash in a kernel does
    (reason,) = warm.warm_up([(case, "flashtrain"), (case, "nobody")], "cpu", 600, workers=1).values()
    assert "its process ended with 1" in reason


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    """One run of every case of the preset, each made small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cases_module._PRESETS, "as-called", lambda _: [tiny(case) for case in PUBLISHED])
        folder = tmp_path_factory.mktemp("as-called") / "run"
        names = "benchmark.implementations=[flashtrain,flashtrain-planned,sdpa-math,flash-attn-4]"
        assert run(folder, *WORDS, names, "benchmark.rounds=1") == 0
        return folder


def test_one_command_gives_every_part_and_names_what_is_missing(finished) -> None:
    rows = read_result(finished / "result.json").rows
    assert [row["part"] for row in rows if row["part"] == "missing"] == ["missing"]
    assert rows[-1] == {
        "part": "missing", "implementation": "flash-attn-4", "status": "missing", "error": "needs an NVIDIA GPU"
    }  # fmt: skip
    ours = [row for row in rows if row["implementation"] == "flashtrain"]
    calls = {tiny(case) for case in PUBLISHED if case.part == "calls"}
    assert len([row for row in ours if row["part"] == "calls"]) == 2 * len(calls)
    assert all(row["milliseconds"] > 0 and row["host_us"] > 0 for row in ours)
    assert all(row["error"] is None or row["error"] < 1e-4 for row in ours)
    assert all(row["of_plain"] > 0 for row in ours if row["part"] == "features")
    assert all(row["gb_per_second"] > 0 for row in ours if row["part"] == "decoding")
    # a matrix in place of a window or of slopes is not what a program would call
    masks = {row["mask"] for row in rows if row["implementation"] == "torch SDPA, math"}
    assert masks == {"full", "causal"}


def test_cases_without_time_are_rows_that_name_them(tmp_path, monkeypatch) -> None:
    real = time.monotonic

    class Slow(Measurement):
        def run(self, *given, **options):
            monkeypatch.setattr(time, "monotonic", lambda: real() + 1000)
            return super().run(*given, **options)

    monkeypatch.setattr(benchmark_run, "Measurement", Slow)
    monkeypatch.setitem(cases_module._PRESETS, "as-called", lambda _: [tiny(PUBLISHED[0]), tiny(PUBLISHED[2])])
    assert run(tmp_path / "run", *WORDS, "benchmark.max_seconds=900") == 0
    rows = [row for row in read_result(tmp_path / "run" / "result.json").rows if row["part"] == "calls"]
    assert {row["status"] for row in rows if row["mask"] == "causal"} == {"no time"}
    left = [row for row in rows if row["mask"] == "full"]
    assert [(row["direction"], row["status"]) for row in left] == [("forward", "left out"), ("backward", "left out")]
    assert left[0]["error"] == "benchmark.max_seconds=900.0 were over"


def test_a_gpu_that_breaks_ends_its_cases_and_not_the_run(tmp_path, monkeypatch) -> None:
    class Broken(Measurement):
        def run(self, *given, **options):
            if self.case.mask == "full":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return super().run(*given, **options)

    monkeypatch.setattr(benchmark_run, "Measurement", Broken)
    monkeypatch.setitem(cases_module._PRESETS, "as-called", lambda _: [tiny(PUBLISHED[0]), tiny(PUBLISHED[2])])
    assert run(tmp_path / "run", *WORDS) == 0
    rows = read_result(tmp_path / "run" / "result.json").rows
    assert {row.get("status") for row in rows if row.get("mask") == "causal"} == {None}
    assert {row["status"] for row in rows if row.get("mask") == "full"} == {"failed"}
