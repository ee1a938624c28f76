"""Training steps measured on a GPU, small: every implementation gives speed, MFU and memory; too much is a row."""

from __future__ import annotations

import pytest
from tiny_runs import flashtrain_command

from flashtrain.report import read_result

pytestmark = pytest.mark.gpu

SMALL = ("benchmark.models=[demo]", "benchmark.rounds=2", "benchmark.steps=2", "logger=csv", "data.tokenizer=bytes",
         "model.vocab_rows=null")  # fmt: skip


def rows_of(recipe: str, folder, *words: str) -> list[dict]:
    done = flashtrain_command(f"recipe={recipe}", *SMALL, *words, f"output={folder}", cwd=folder, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = folder.glob(f"{recipe}/*/result.json")
    return read_result(result).rows


@pytest.mark.timeout(900)
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_every_implementation_gives_speed_mfu_and_memory(weights: str, tmp_path) -> None:
    pytest.importorskip("transformers")
    words = ("benchmark.contexts=[256]", "benchmark.batches=[2,4]", "benchmark.implementations=null")
    rows = rows_of("gpt2-speed", tmp_path, *words, f"benchmark.weights=[{weights}]")
    assert len(rows) == 9 * 2
    for row in rows:
        assert row.get("status") is None, row
        assert row["tokens_per_second"] > 0
        assert 0 < row["mfu"] < 1
        assert 0 < row["peak_memory_gib"] < 4
        assert row["weights"] == weights
    compiled = [row for row in rows if "compiled" in row["implementation"]]
    assert compiled
    assert all(row["compile_seconds"] > 0 for row in compiled)
    assert all(row["speedup"] > 0 for row in rows)


@pytest.mark.timeout(900)
def test_standard_attention_runs_out_of_memory_where_ours_goes_on(tmp_path) -> None:
    words = ("benchmark.contexts=[1024,262144]", "benchmark.tokens=1024")
    rows = rows_of("context-speed", tmp_path, *words, "benchmark.implementations=[flashtrain,standard]")
    told = {(row["implementation"].split(",")[0], row["context"]): row for row in rows}
    assert told["plain PyTorch", 262144]["status"] == "out of memory"
    assert told["flashtrain", 262144]["tokens_per_second"] > 0
    assert told["flashtrain", 1024]["peak_memory_gib"] < told["plain PyTorch", 1024]["peak_memory_gib"]


@pytest.mark.timeout(900)
def test_the_commands_cost_is_measured(tmp_path) -> None:
    words = ("benchmark.contexts=[256]", "benchmark.batches=[8]", "benchmark.implementations=[flashtrain]")
    rows = rows_of("gpt2-speed", tmp_path, *words, "benchmark.command_steps=40", "data.include_tests=false")
    (row,) = [row for row in rows if row["implementation"] == "flashtrain, the whole command"]
    assert row.get("status") is None, row
    assert row["milliseconds"] > 0.5 * row["bare_milliseconds"]
