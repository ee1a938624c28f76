"""rows=as-called: a whole run of its cases made small, and what is called once before."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from jobs import run_job
from test_attention_turns import CASE

from flashtrain.command.compose import compose_settings
from flashtrain.report.rows import read_result
from flashtrain_recipes.attention_benchmark import cases as cases_module
from flashtrain_recipes.attention_benchmark import warm
from flashtrain_recipes.attention_benchmark.cases import Case, cases, document_lengths
from flashtrain_recipes.attention_benchmark.settings import AttentionSettings

PUBLISHED = cases(AttentionSettings(rows="as-called"))
WORDS = (
    "recipe=attention-benchmark", "hardware=cpu", "logger=none", "hardware.demo=never",
    "benchmark.rows=as-called",
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
        plain_head_dim=case.plain_head_dim // 8,
        mask=case.mask.replace("1024", "9"),
        documents=document_lengths(length) if case.documents else (),
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    """One run of every case of the preset, each made small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            cases_module._PRESETS, "as-called", lambda _: [tiny(case) for case in PUBLISHED]
        )
        folder = tmp_path_factory.mktemp("as-called")
        assert (
            run_job(compose_settings(WORDS), folder, overrides=[*WORDS], started=time.monotonic())
            == 0
        )
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


@pytest.mark.slow  # processes import torch
def test_processes_call_everything_once_and_end_with_the_time() -> None:
    calls = [(CASE, "flashtrain"), (CASE, "standard")]
    warm.warm_up(calls, 300, "cpu")
    warm.warm_up(calls, 0.1, "cpu")


def test_each_case_can_be_called_in_both_directions_before() -> None:
    for case in PUBLISHED:
        for name in ("flashtrain", "standard"):
            warm.call_once(replace(tiny(case), dtype_name="float32"), name, "cpu")
