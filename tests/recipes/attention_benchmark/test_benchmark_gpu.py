"""Benchmarks on a GPU, small: every implementation that is there is measured, and
right; too much is a row."""

from __future__ import annotations

import pytest
from tiny_runs import flashtrain_command

from flashtrain.report.rows import read_result

pytestmark = pytest.mark.gpu

ALWAYS = {"flashtrain", "torch SDPA, FlashAttention-2", "FlexAttention", "standard attention"}


SMALL_STEPS = (
    "benchmark.models=[demo]", "benchmark.rounds=2", "benchmark.steps=2", "data.tokenizer=bytes",
    "model.vocab_rows=null",
)  # fmt: skip


def rows_of(recipe: str, folder, *words: str) -> list[dict]:
    small = ("benchmark.rounds=3",) if recipe == "attention-benchmark" else SMALL_STEPS
    words = (f"recipe={recipe}", "logger=csv", *small, *words, f"output={folder}")
    done = flashtrain_command(*words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = folder.glob(f"{recipe}/*/result.json")
    return read_result(result).rows


@pytest.mark.longest
def test_all_are_measured_in_both_directions_with_time_memory_and_a_small_error(tmp_path) -> None:
    rows = rows_of(
        "attention-benchmark",
        tmp_path,
        "benchmark.seqlens=[512]",
        "benchmark.masks=[causal]",
        "benchmark.tokens=4096",
    )
    assert {row["implementation"] for row in rows if row["direction"] == "backward"} >= ALWAYS
    assert all(
        row["milliseconds"] > 0 and row["peak_memory_mib"] > 0 and row["error"] < 0.03
        for row in rows
    )
    assert all(row["host_milliseconds"] > 0 for row in rows)


@pytest.mark.longest
def test_calls_by_themselves_features_and_caches_have_the_processors_time_and_a_small_error(
    tmp_path,
) -> None:
    words = ("benchmark.rows=as-called", "benchmark.seqlens=[1,256]", "benchmark.warm_seconds=90")
    rows = rows_of(
        "attention-benchmark", tmp_path, *words, "benchmark.implementations=[flashtrain,sdpa-flash]"
    )
    ours = [row for row in rows if row["implementation"] == "flashtrain"]
    assert {row["part"] for row in ours} == {"calls", "decoding"}
    assert all(
        row["host_us"] > 0 and row["milliseconds"] > 0 and row["error"] < 0.03 for row in ours
    )
    assert all(row["gpu_milliseconds"] > 0 for row in ours if row["part"] == "decoding")


@pytest.mark.longest
def test_windows_documents_and_block_masks_run_by_ours_and_by_flex_attention(tmp_path) -> None:
    masks = "benchmark.masks=[window-256,causal-varlen,causal-document,prefix-lm,block-random]"
    words = (
        "benchmark.seqlens=[2048]",
        "benchmark.head_dims=[64]",
        "benchmark.densities=[0.25]",
        masks,
    )
    rows = rows_of(
        "attention-benchmark",
        tmp_path,
        *words,
        "benchmark.implementations=[flashtrain,flex,varlen-attn]",
    )
    for mask in ("window-256", "causal-varlen", "causal-document", "prefix-lm", "block-random"):
        found = {(row["implementation"], row["direction"]) for row in rows if row["mask"] == mask}
        assert {
            (name, way)
            for name in ("flashtrain", "FlexAttention")
            for way in ("forward", "backward")
        } <= found
    assert all(row["error"] < 0.03 for row in rows)


@pytest.mark.longest
@pytest.mark.parametrize(("weights", "batch"), [("fp32", 2), ("bf16", 4)])
def test_every_implementation_gives_speed_mfu_and_memory(
    weights: str, batch: int, tmp_path
) -> None:
    pytest.importorskip("transformers")
    # What holds its weights in bfloat16 differs by implementation in nothing that the
    # other rows do not show.
    kinds = "null" if weights == "fp32" else "[flashtrain,pytorch,hf-eager,hf-sdpa-compile]"
    words = (
        "benchmark.contexts=[256]",
        f"benchmark.batches=[{batch}]",
        f"benchmark.implementations={kinds}",
    )
    rows = rows_of("gpt2-speed", tmp_path, *words, f"benchmark.weights=[{weights}]")
    assert len(rows) == (10 if weights == "fp32" else 4)
    for row in rows:
        assert row.get("status") is None, row
        assert row["tokens_per_second"] > 0
        assert 0 < row["mfu"] < 1
        assert 0 < row["peak_memory_gib"] < 4
        assert row["weights"] == weights
    # Others may find that compiled which these were the first to need: torch.compile
    # keeps code by function.
    seconds = {
        row["implementation"]: row["compile_seconds"]
        for row in rows
        if "compiled" in row["implementation"]
    }
    assert seconds["plain PyTorch, SDPA, compiled"] > 0, seconds
    assert seconds["Hugging Face, SDPA, compiled"] > 0, seconds
    assert min(seconds.values()) >= 0, seconds
    assert all(row["speedup"] > 0 for row in rows)


@pytest.mark.longest
def test_standard_attention_runs_out_of_memory_where_ours_goes_on(tmp_path) -> None:
    words = ("benchmark.contexts=[1024,262144]", "benchmark.tokens=1024")
    rows = rows_of(
        "context-speed", tmp_path, *words, "benchmark.implementations=[flashtrain,standard]"
    )
    told = {(row["implementation"].split(",")[0], row["context"]): row for row in rows}
    assert told["plain PyTorch", 262144]["status"] == "out of memory"
    assert told["flashtrain", 262144]["tokens_per_second"] > 0
    assert (
        told["flashtrain", 1024]["peak_memory_gib"] < told["plain PyTorch", 1024]["peak_memory_gib"]
    ), told


@pytest.mark.longest
def test_the_commands_cost_is_measured(tmp_path) -> None:
    words = (
        "benchmark.contexts=[256]",
        "benchmark.batches=[8]",
        "benchmark.implementations=[flashtrain]",
    )
    rows = rows_of(
        "gpt2-speed", tmp_path, *words, "benchmark.command_steps=40", "data.include_tests=false"
    )
    (row,) = [row for row in rows if row["implementation"] == "flashtrain, the whole command"]
    assert row.get("status") is None, row
    assert row["milliseconds"] > 0.5 * row["bare_milliseconds"]
