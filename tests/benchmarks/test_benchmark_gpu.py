"""The benchmark on a GPU, small: every implementation that is there is measured, and right."""

from __future__ import annotations

import pytest
from tiny_runs import flashtrain_command

from flashtrain.report import read_result

pytestmark = pytest.mark.gpu

ALWAYS = {"flashtrain", "torch SDPA, FlashAttention-2", "FlexAttention", "standard attention"}


def rows_of(folder, *words: str) -> list[dict]:
    done = flashtrain_command(
        "recipe=attention-benchmark", "logger=csv", "benchmark.rounds=3", *words, f"output={folder}", cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = folder.glob("attention-benchmark/*/result.json")
    return read_result(result).rows


def test_all_are_measured_in_both_directions_with_time_memory_and_a_small_error(tmp_path) -> None:
    rows = rows_of(tmp_path, "benchmark.seqlens=[512]", "benchmark.masks=[causal]", "benchmark.tokens=4096")
    assert {row["implementation"] for row in rows if row["direction"] == "backward"} >= ALWAYS
    assert all(row["milliseconds"] > 0 and row["peak_memory_mib"] > 0 and row["error"] < 0.03 for row in rows)
    assert all(row["host_milliseconds"] > 0 for row in rows)


def test_windows_documents_and_block_masks_run_by_ours_and_by_flex_attention(tmp_path) -> None:
    masks = "benchmark.masks=[window-256,causal-varlen,causal-document,prefix-lm,block-random]"
    words = ("benchmark.seqlens=[2048]", "benchmark.head_dims=[64]", "benchmark.densities=[0.25]", masks)
    rows = rows_of(tmp_path, *words, "benchmark.implementations=[flashtrain,flex,varlen-attn]")
    for mask in ("window-256", "causal-varlen", "causal-document", "prefix-lm", "block-random"):
        found = {(row["implementation"], row["direction"]) for row in rows if row["mask"] == mask}
        assert {(name, way) for name in ("flashtrain", "FlexAttention") for way in ("forward", "backward")} <= found
    assert all(row["error"] < 0.03 for row in rows)
