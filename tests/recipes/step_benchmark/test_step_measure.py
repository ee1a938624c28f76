"""One case measured by implementations made up for the purpose: taking turns, running out of memory and of time."""

from __future__ import annotations

import time

import pytest
import torch
from made_up import CASE, CPU, NO_MEMORY, MadeUp, MemoryClock, runs_out

from flashtrain_recipes.benchmark_runner.measuring import CpuClock, Effort
from flashtrain_recipes.step_benchmark.measure import StepMeasurement
from flashtrain_recipes.step_benchmark.training_step import MemoryChoice

COLUMNS = {
    "implementation", "model", "context", "batch", "weights", "tokens_per_second", "mfu", "peak_memory_gib",
    "milliseconds", "compile_seconds",
}  # fmt: skip
EFFORT = Effort(rounds=3, steps=2)


def measurement(notes: list | None = None, clock: CpuClock | None = None, **options) -> StepMeasurement:
    notes = notes if notes is not None else []
    return StepMeasurement(
        CASE, CPU, clock or CpuClock(), seed=0, note=lambda title, reason: notes.append((title, reason)), **options
    )


def test_every_implementation_and_batch_gets_a_row_with_every_column() -> None:
    contenders = [MadeUp("a"), MadeUp("b")]
    rows = measurement(clock=MemoryClock(), peak_flops=1e12).run(contenders, [2, 4], EFFORT)
    assert [(row["implementation"], row["batch"]) for row in rows] == [("a", 2), ("b", 2), ("a", 4), ("b", 4)]
    for row in rows:
        assert set(row) >= COLUMNS
        assert row["tokens_per_second"] == pytest.approx(row["batch"] * 8 / row["milliseconds"] * 1e3, rel=0.05)
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * CASE.flops_per_token() / 1e12, abs=1e-4)
        assert row["turns"] == 3


def test_the_peak_of_a_row_is_the_models_own_memory_and_what_a_step_needs_beyond() -> None:
    (row, _) = measurement(clock=MemoryClock()).run([MadeUp("a"), MadeUp("b")], [2], EFFORT)
    assert row["peak_memory_gib"] == pytest.approx((100 + 1024) / 1024, abs=1e-3)


def test_a_row_says_what_was_done_for_memory_and_each_way_is_a_model_of_its_own() -> None:
    built: list[int] = []

    class Saving(MadeUp):
        def memory(self, case, batch):
            return MemoryChoice("full checkpointing", 2.5) if batch > 2 else MemoryChoice()

        def build(self, case, batch, device):
            built.append(batch)
            return super().build(case, batch, device)

    rows = measurement(clock=MemoryClock()).run([Saving("a")], [1, 2, 4], EFFORT)
    assert built == [1, 4]
    assert [row.get("memory") for row in rows] == [None, None, "full checkpointing"]
    assert [row.get("memory_estimate_gib") for row in rows] == [None, None, 2.5]


def test_in_each_round_all_take_turns_and_the_first_moves_on() -> None:
    calls: list[str] = []
    measurement().run([MadeUp("a", calls), MadeUp("b", calls)], [2], Effort(rounds=2, steps=1))
    # two first steps each, then turns of one untimed and one timed step
    assert "".join(calls) == "aabb" + "aabb" + "bbaa"


def test_a_batch_that_does_not_fit_is_a_row_and_larger_ones_are_not_tried() -> None:
    notes: list = []
    full = MadeUp("full", does=runs_out(at=4))
    rows = measurement(notes).run([full, MadeUp("other")], [2, 4, 8], EFFORT)
    told = {(row["implementation"], row["batch"]): row for row in rows}
    assert told["full", 2]["tokens_per_second"] > 0
    for batch in (4, 8):
        assert told["full", batch]["status"] == "out of memory"
        assert told["full", batch]["tokens_per_second"] is None
        assert told["other", batch]["tokens_per_second"] > 0
    assert told["full", 8]["error"] == "not tried: a batch of 4 ran out of memory already"
    assert ("full", "out of memory at batch 4") in notes


def test_what_fits_only_alone_is_measured_with_the_others_in_main_memory() -> None:
    other = MadeUp("other")

    def does(batch: int) -> None:
        if not other.moves or other.moves.count("cpu") == 0:
            raise torch.OutOfMemoryError(NO_MEMORY)

    rows = measurement().run([other, MadeUp("large", does=does)], [2], EFFORT)
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert {row["implementation"] for row in rows} == {"other", "large"}
    assert len(other.moves) > 2  # there and back more than once


def test_running_out_of_memory_in_a_later_turn_costs_only_that_implementation() -> None:
    calls: list[str] = []

    def does(batch: int) -> None:
        if len(calls) > 6:
            raise RuntimeError("backend said: CUDA out of memory")

    rows = measurement().run([MadeUp("late", calls, does), MadeUp("other")], [2], Effort(rounds=5, steps=1))
    turns = {row["implementation"]: row["turns"] for row in rows}
    assert turns["other"] == 5
    assert turns["late"] < 5  # what it gave until then counts


def test_an_error_of_one_implementation_is_its_row_and_the_rest_goes_on() -> None:
    def does(batch: int) -> None:
        raise ValueError("no kernel for this shape")

    notes: list = []
    rows = measurement(notes).run([MadeUp("broken", does=does), MadeUp("other")], [2], EFFORT)
    assert [row.get("status") for row in rows] == [None, "failed"]
    assert rows[1]["error"] == "ValueError: no kernel for this shape"
    assert notes == [("broken", "failed at batch 2: ValueError: no kernel for this shape")]


def test_an_implementation_that_is_not_there_is_one_row_that_says_why() -> None:
    absent = MadeUp("absent")
    absent.missing = lambda device: "needs another package"  # type: ignore[method-assign]
    rows = measurement().run([absent, MadeUp("other")], [2, 4], EFFORT)
    (row,) = [row for row in rows if row["implementation"] == "absent"]
    assert (row["status"], row["error"], row["batch"]) == ("not available", "needs another package", None)


def test_when_the_time_is_over_nothing_more_is_begun_and_rows_say_so(passing) -> None:
    slow = MadeUp("slow", does=lambda batch: passing(0.05))
    notes: list = []
    effort = Effort(9, 9, seconds=60, until=time.monotonic() + 0.1)
    rows = measurement(notes).run([slow, MadeUp("late")], [2, 4], effort)
    told = {(row["implementation"], row["batch"]): row.get("status") for row in rows}
    assert told == {("slow", 2): None, ("late", 2): "no time left", ("slow", 4): "no time left",
                    ("late", 4): "no time left"}  # fmt: skip
    assert ("late", "no time left at batch 2: benchmark.max_seconds leave no time for it") in notes


def test_what_is_expected_to_take_too_long_is_not_begun() -> None:
    effort = Effort(2, 1, until=time.monotonic() + 600)
    rows = measurement(expected={"long": 1000.0}).run([MadeUp("long"), MadeUp("short")], [2], effort)
    assert {row["implementation"]: row.get("status") for row in rows} == {"short": None, "long": "no time left"}


def test_a_loss_that_is_no_number_is_not_a_measurement() -> None:
    class NotANumber(MadeUp):
        def build(self, case, batch, device):
            step = super().build(case, batch, device)
            with torch.no_grad():
                next(step.model.parameters()).fill_(float("nan"))
            return step

    (row,) = measurement().run([NotANumber("nan")], [2], EFFORT)
    assert (row["status"], row["error"]) == ("failed", "ArithmeticError: the first loss is nan")


def test_steps_that_take_long_are_few(monkeypatch, passing) -> None:
    monkeypatch.setattr("flashtrain_recipes.step_benchmark.measure._SLOW_SECONDS", 0.02)
    calls: list[str] = []
    slow = MadeUp("slow", calls, does=lambda batch: passing(0.03))
    (row,) = measurement().run([slow], [2], Effort(rounds=5, steps=10))
    assert len(calls) == 3  # the first, the one that tells memory, and one more
    assert row["turns"] == 2
