"""One case of training steps by baselines made up for the purpose: taking turns, running out
of memory and of time."""

from __future__ import annotations

import pytest
import torch
from made_up import CASE, MadeUp, MemoryClock, out_of_memory, turns

from flashtrain_recipes.harness.turns import Effort
from flashtrain_recipes.step_benchmark.training_step import MemoryChoice


def test_every_baseline_gets_a_row_with_every_column() -> None:
    rows = turns(clock=MemoryClock(), peak_flops=1e12).run([MadeUp("a"), MadeUp("b")])
    assert [row["implementation"] for row in rows] == ["a", "b"]
    for row in rows:
        assert {"model", "context", "batch", "weights", "compile_seconds"} < set(row)
        assert row["tokens_per_second"] == pytest.approx(
            2 * 8 / row["milliseconds"] * 1e3, rel=0.05
        )
        assert row["mfu"] == pytest.approx(
            row["tokens_per_second"] * CASE.flops_per_token() / 1e12, abs=1e-4
        )
        assert row["turns"] == 3
        # the model's own memory and what a step needs beyond
        assert row["peak_memory_gib"] == pytest.approx((100 + 1024) / 1024, abs=1e-3)


def test_a_row_says_what_was_done_for_memory() -> None:
    saving = MadeUp("a")
    saving.memory = lambda case: MemoryChoice(("full checkpointing"), 2.5)  # type: ignore[method-assign]
    (row,) = turns(clock=MemoryClock()).run([saving])
    assert (row["memory"], row["memory_estimate_gib"]) == ("full checkpointing", 2.5)


def test_a_turn_is_one_untimed_step_and_the_timed_ones() -> None:
    calls: list[str] = []
    turns(effort=Effort(rounds=2, steps=2)).run([MadeUp("a", calls), MadeUp("b", calls)])
    assert "".join(calls) == "aabb" + "aaabbb" + "bbbaaa"  # two first steps each, then the rounds


def test_out_of_memory_is_a_row_and_what_needs_as_much_is_not_tried() -> None:
    notes: list = []
    full: list = []
    first, other = turns(notes, full=full).run(
        [MadeUp("full", does=out_of_memory), MadeUp("other")]
    )[::-1]
    assert (first["status"], "milliseconds" in first, other["turns"]) == ("out of memory", False, 3)
    assert ("full", "out of memory") in notes
    (row,) = turns(batch=4, full=full).run([MadeUp("full", does=lambda: pytest.fail("tried"))])
    assert (row["status"], row["error"]) == (
        "out of memory",
        "not tried: a batch of 2 x 8 ran out of memory already",
    )
    (smaller,) = turns(batch=1, full=full).run([MadeUp("full")])
    adapts = MadeUp("full")
    adapts.adapts = True
    assert smaller["turns"] == turns(batch=4, full=full).run([adapts])[0]["turns"] == 3


def test_what_fits_only_alone_is_measured_after_the_others() -> None:
    calls: list[str] = []
    notes: list = []

    def does() -> None:
        if calls == ["other", "other", "large"]:  # its first step beside the other's model
            out_of_memory()

    rows = turns(notes).run([MadeUp("other", calls), MadeUp("large", calls, does)])
    assert [(row["implementation"], row["turns"]) for row in rows] == [("other", 3), ("large", 3)]
    assert calls[3:12] == ["other"] * 9
    assert notes == []


def test_a_loss_that_is_no_number_is_not_a_measurement() -> None:
    class NotANumber(MadeUp):
        def build(self, case, device):
            step = super().build(case, device)
            with torch.no_grad():
                next(step.model.parameters()).fill_(float("nan"))
            return step

    (row,) = turns().run([NotANumber("nan")])
    assert (row["status"], row["error"]) == (
        "failed",
        "the first loss is nan, expected a finite number",
    )


def test_steps_that_take_long_are_few(monkeypatch, passing) -> None:
    monkeypatch.setattr("flashtrain_recipes.step_benchmark.turns._MAX_SECONDS", 0.02)
    (row,) = turns(effort=Effort(rounds=5)).run([MadeUp("slow", does=lambda: passing(0.03))])
    assert row["turns"] == 1
