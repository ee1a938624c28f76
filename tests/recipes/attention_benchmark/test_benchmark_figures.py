"""Figures of attention from rows: what makes a curve, and which lines are drawn."""

from __future__ import annotations

import pytest

from flashtrain.errors import UserError
from flashtrain_recipes.attention_benchmark.figures import (
    both_directions,
    largest_shape,
    lengths_figure,
)


def row(direction: str, length: int, name: str = "flashtrain", **changes) -> dict:
    return {
        "implementation": name, "direction": direction, "batch": 16, "seqlen_q": length,
        "seqlen_k": length, "heads": 8,
        "kv_heads": 8, "head_dim": 64, "mask": "full", "dropout": 0.0, "dtype": "bfloat16",
        "milliseconds": length / (1000 if direction == "forward" else 400), "tflops": 300.0,
        "peak_memory_mib": length / 64, "error": 0.003, **changes,
    }  # fmt: skip


ROWS = [
    row(direction, length) for length in (512, 1024, 4096) for direction in ("forward", "backward")
]


def test_forward_and_backward_are_added_and_the_larger_memory_is_kept() -> None:
    joined = both_directions(
        [row("forward", 512, peak_memory_mib=5.0), row("backward", 512, peak_memory_mib=9.0)]
    )
    assert joined == [
        {"implementation": "flashtrain", "seqlen_q": 512,
         "forward_backward_tflops": pytest.approx(300), "peak_memory_gib": 9 / 1024,
         "measured": None}
    ]  # fmt: skip


def test_a_figure_is_of_the_shape_with_the_most_lengths() -> None:
    others = [row("forward", length, mask="causal") for length in (512, 1024)]
    name, kept = largest_shape([*others, *ROWS, row("forward", 512, head_dim=128)])
    assert (name, kept) == ("8 heads of 64, full, bfloat16", ROWS)
    with pytest.raises(UserError, match="no shape was measured at two lengths"):
        largest_shape(ROWS[:2])


def test_a_figure_has_four_lines_at_most_and_flashtrains_is_the_first(
    tmp_path, monkeypatch
) -> None:
    drawn: list[list[str]] = []

    def note(rows, x, y, group, path, **_):
        drawn.append(list(dict.fromkeys(each["implementation"] for each in rows)))
        return path

    monkeypatch.setattr("flashtrain_recipes.attention_benchmark.figures.line_figure", note)
    others = ("FlexAttention", "torch SDPA, cuDNN", "flash-attn-4", "standard attention")
    rows = [
        row(each["direction"], each["seqlen_q"], name)
        for name in (*others, "flashtrain")
        for each in ROWS
    ]
    lengths_figure(rows, tmp_path / "a.png")
    assert drawn == [["flashtrain", "standard attention", "flash-attn-4", "torch SDPA, cuDNN"]]
