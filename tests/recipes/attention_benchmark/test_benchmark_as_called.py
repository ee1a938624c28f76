"""rows=as-called: the cases, a whole run of them made small, and what is called once before."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch
from test_attention_turns import CASE

from flashtrain.command.compose import compose_settings
from flashtrain.command.job import run_job, settle
from flashtrain.report.rows import read_result
from flashtrain_recipes.attention_benchmark import cases as cases_module
from flashtrain_recipes.attention_benchmark import measure, warm
from flashtrain_recipes.attention_benchmark.baselines import all_baselines
from flashtrain_recipes.attention_benchmark.cases import Case, cases, document_lengths
from flashtrain_recipes.attention_benchmark.settings import AttentionSettings
from flashtrain_recipes.harness.benchmark import Benchmark
from flashtrain_recipes.harness.run_folder import Run

PUBLISHED = cases(AttentionSettings(rows="as-called"))
# The rows that another implementation led: batch, heads, length, head dimension
FIRST = {(32, 12, 1024, 64), (1, 16, 32768, 128), (64, 16, 512, 64), (64, 16, 256, 128), (32, 32, 512, 64),
         (1, 32, 32768, 64)}  # fmt: skip
WORDS = (
    "recipe=attention-benchmark", "hardware=cpu", "logger=none", "hardware.demo=never", "benchmark.rows=as-called",
    "benchmark.dtype=float32", "benchmark.rounds=1",
    "benchmark.implementations=[flashtrain,flashtrain-planned,sdpa-math,flash-attn-4]",
)  # fmt: skip


def tiny(case: Case) -> Case:
    """A case of the preset, made small: what is called, and how, stays."""
    length = 1 if case.page is not None else 256 if case.has_documents else 64
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


def test_the_rows_that_others_lead_come_first_and_no_case_comes_twice() -> None:
    assert {(c.batch, c.heads, c.seqlen_q, c.head_dim) for c in PUBLISHED[:6]} == FIRST
    assert len(set(PUBLISHED)) == len(PUBLISHED)
    assert all(set(c.documents) <= set(range(300, 6001)) for c in PUBLISHED if c.documents)
    assert {c.head_dim for c in PUBLISHED} == {64, 96, 128, 256}
    assert set(measure.AS_CALLED) < {one.name for one in all_baselines()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    """One run of every case of the preset, each made small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cases_module._PRESETS, "as-called", lambda _: [tiny(case) for case in PUBLISHED])
        folder = tmp_path_factory.mktemp("as-called")
        assert run_job(compose_settings(WORDS), folder, overrides=[*WORDS], started=time.time()) == 0
        return folder


@pytest.mark.integration
def test_one_command_gives_every_part_and_names_what_is_missing(finished) -> None:
    rows = read_result(finished / "result.json").rows
    (missing,) = [row for row in rows if row["part"] == "missing"]
    assert (missing["implementation"], missing["error"]) == ("flash-attn-4", "needs an NVIDIA GPU")
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


def test_on_a_gpu_all_that_is_compiled_is_called_before_and_never_for_more_than_half_of_the_time(
    monkeypatch, passing, tmp_path
) -> None:
    words = ["recipe=attention-benchmark", "benchmark.rows=as-called", "hardware=cpu", "hardware.demo=never"]
    one = measure.AttentionBenchmark(*settle(compose_settings(words), words))
    one.device = torch.device("cuda")
    seen: list = []
    monkeypatch.setattr(Benchmark, "follow", lambda *_: 0)
    monkeypatch.setattr(measure, "warm_up", lambda *given: seen.append(given))
    monkeypatch.setattr(Run, "seconds_left", 60.0)
    assert one.follow(Run(tmp_path, "", (), [], math.inf)) == 0
    ((calls, seconds),) = seen
    assert calls[:3] == [
        (PUBLISHED[0], "flashtrain"), (PUBLISHED[1], "flashtrain"), (PUBLISHED[1], "flashtrain-planned")
    ]  # fmt: skip
    assert not any(name.startswith("sdpa") for _, name in calls)
    assert seconds == 30


@pytest.mark.slow  # processes import torch
def test_processes_call_everything_once_and_end_with_the_time() -> None:
    calls = [(CASE, "flashtrain"), (CASE, "standard")]
    warm.warm_up(calls, 300, "cpu")
    warm.warm_up(calls, 0.1, "cpu")


def test_each_case_can_be_called_in_both_directions_before() -> None:
    for case in PUBLISHED:
        for name in ("flashtrain", "standard"):
            warm.call_once(replace(tiny(case), dtype_name="float32"), name, "cpu")
