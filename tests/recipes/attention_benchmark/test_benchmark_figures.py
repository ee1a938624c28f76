"""The paper's figures from rows: what makes a curve, and where the paper's own values stand."""

from __future__ import annotations

import pytest

from flashtrain.errors import UserError
from flashtrain_recipes.attention_benchmark.figures import (
    both_directions,
    largest_shape,
    memory_figure,
    runtime_figure,
)


def row(direction: str, length: int, name: str = "flashtrain", **changes) -> dict:
    return {
        "implementation": name, "direction": direction, "batch": 16, "seqlen_q": length, "seqlen_k": length, "heads": 8,
        "kv_heads": 8, "head_dim": 64, "mask": "full", "dropout": 0.0, "dtype": "bfloat16",
        "milliseconds": length / (1000 if direction == "forward" else 400), "tflops": 300.0,
        "peak_memory_mib": length / 64, "error": 0.003, **changes,
    }  # fmt: skip


ROWS = [row(direction, length) for length in (512, 1024, 4096) for direction in ("forward", "backward")]


def test_forward_and_backward_are_added_and_the_larger_memory_is_kept() -> None:
    joined = both_directions([row("forward", 512, peak_memory_mib=5.0), row("backward", 512, peak_memory_mib=9.0)])
    assert joined == [
        {"implementation": "flashtrain", "seqlen_q": 512, "batch": 16,
         "forward_backward_milliseconds": pytest.approx(0.512 + 1.28), "peak_memory_mib": 9.0}
    ]  # fmt: skip


def test_a_figure_is_of_the_shape_with_the_most_lengths() -> None:
    others = [row("forward", length, mask="causal") for length in (512, 1024)]
    name, kept = largest_shape([*others, *ROWS, row("forward", 512, head_dim=128)])
    assert (name, kept) == ("8 heads of 64, full, bfloat16", ROWS)
    with pytest.raises(UserError, match="no shape was measured at two lengths"):
        largest_shape(ROWS[:2])
    with pytest.raises(UserError, match="peak_memory_mib"):
        memory_figure([{**each, "peak_memory_mib": None} for each in ROWS], "none.png")


def test_the_paper_stands_beside_its_own_shape_only(tmp_path, monkeypatch) -> None:
    drawn: list[tuple[str, set[str]]] = []

    def note(rows, x, y, group, path, *, title, **_):
        drawn.append((title, {each["implementation"] for each in rows}))
        return path

    monkeypatch.setattr("flashtrain_recipes.attention_benchmark.figures.line_figure", note)
    runtime_figure(ROWS, tmp_path / "a.png")
    runtime_figure([{**each, "mask": "causal"} for each in ROWS], tmp_path / "b.png")
    (paper_title, with_paper), (title, without) = drawn
    assert "FlashAttention (paper)" in with_paper
    assert "A100-40GB" in paper_title
    assert without == {"flashtrain"}
    assert "A100" not in title
