"""One case measured: baselines take turns, while there is time; what fails is a
row, and the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from flashtrain.errors import UserError
from flashtrain_recipes.harness.baseline import Baseline, choose
from flashtrain_recipes.harness.clock import Clock
from flashtrain_recipes.harness.turns import Effort, Entry, Turns

CPU = torch.device("cpu")


@dataclass(frozen=True)
class OneCase:
    def columns(self):
        return {"size": 7}


class Named(Baseline):
    """Writes down when it is called; `does` is called with the part first."""

    def __init__(
        self, title: str, calls: list[str] | None = None, does: Callable[[str], object] = str
    ) -> None:
        self.name = self.title = title
        self.calls, self.does = [] if calls is None else calls, does

    def call(self, part: str) -> None:
        self.does(part)
        self.calls.append(self.title + part)


class TwoParts(Turns[OneCase, Entry[Named]]):
    """Parts 1 and 2, the second of which is started by itself."""

    def start(self, baseline: Named) -> None:
        entry = Entry(baseline, {"1": []})
        baseline.call("1")
        if self.attempt(baseline, "2", partial(baseline.call, "2")):
            entry.samples["2"] = []
        self.entries.append(entry)

    def sample(self, entry: Entry[Named], part: str, number: int) -> dict[str, float]:
        entry.baseline.call(part)
        return {"milliseconds": float(number)}

    def rows_of(self, entry: Entry[Named]):
        return [
            {"implementation": entry.baseline.title, "part": part, **entry.medians(part)}
            for part, samples in entry.samples.items() if samples
        ]  # fmt: skip


def measure(*baselines: Named, clock: Clock | None = None, **effort):
    notes: list[tuple[str, str]] = []
    turns = TwoParts(
        OneCase(), device=CPU, clock=clock or Clock(), seed=0,
        effort=Effort(**{"rounds": 3, **effort}),
        note=lambda title, reason: notes.append((title, reason)),
    )  # fmt: skip
    return turns.run(baselines), notes


def failing(error: BaseException, part: str = "1", after: int = 0) -> Callable[[str], None]:
    """Raises at the call of a part, after so many of them."""
    calls: list[str] = []

    def fail(called: str) -> None:
        calls.append(called)
        if called == part and calls.count(part) > after:
            raise error

    return fail


def test_baselines_take_turns_and_the_first_moves_on() -> None:
    calls: list[str] = []
    rows, notes = measure(*[Named(name, calls) for name in "abc"])
    assert calls[:6] == ["a1", "a2", "b1", "b2", "c1", "c2"]
    assert "".join(call[0] for call in calls[6:]) == "abcabcbcabcacabcab"
    assert [(row["implementation"], row["part"], row["milliseconds"]) for row in rows] == [
        (name, part, 1.0) for name in "abc" for part in "12"
    ]
    assert notes == []


def test_what_fails_is_a_row_with_its_first_line_and_the_others_go_on() -> None:
    rows, notes = measure(
        Named("bad", does=failing(ValueError("head_dim 16 is\nnot supported"))),
        Named("half", does=failing(RuntimeError("no backward"), "2")),
        Named("big", does=failing(torch.OutOfMemoryError("CUDA out of memory"))),
        Named("late", does=failing(RuntimeError("gone"), "2", after=2)), Named("good"),
    )  # fmt: skip
    found = {
        (row["implementation"], row.get("part")): (row.get("status"), row.get("error"))
        for row in rows
    }
    assert found["bad", None] == ("failed", "head_dim 16 is")
    assert found["big", None] == ("out of memory", None)
    assert found["half", None] == ("failed", "no backward")
    # What it gave before counts.
    assert found["half", "1"] == found["good", "2"] == found["late", "2"] == (None, None)
    assert {row["size"] for row in rows if "status" in row} == {7}
    assert notes == [
        ("bad", "head_dim 16 is"),
        ("half", "2: no backward"),
        ("big", "out of memory"),
    ]


def test_what_does_not_apply_is_nothing_and_what_is_refused_a_note() -> None:
    refusing, elsewhere = Named("refusing"), Named("elsewhere")
    refusing.refuses = lambda case: "no such mask"
    elsewhere.applies = lambda case: False
    rows, notes = measure(refusing, elsewhere, Named("good"))
    assert {row["implementation"] for row in rows} == {"good"}
    assert notes == [("refusing", "no such mask")]


def test_rounds_end_with_the_cases_share_of_the_time_but_not_before_three() -> None:
    calls: list[str] = []
    measure(Named("a", calls), rounds=50, late=time.monotonic())
    assert calls == ["a1", "a2"] * 4


def test_without_time_nothing_is_begun_and_a_round_under_way_gives_each_one_figure() -> None:
    rows, _ = measure(Named("a"), until=time.monotonic())
    assert [row["status"] for row in rows] == ["no time left"]
    over = time.monotonic() + 0.1
    calls: list[str] = []
    measure(Named("slow", calls, lambda part: time.sleep(0.06)), rounds=50, until=over)
    assert calls == ["slow1", "slow2"] * 2


def test_a_broken_gpu_ends_the_case() -> None:
    class Broken(Clock):
        def free_cache(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure(Named("bad", does=failing(RuntimeError("CUDA error"))), clock=Broken())


def test_what_a_device_cannot_have_is_named_with_its_reason() -> None:
    rare = Named("rare")
    rare.missing = lambda device: f"not on {device}"
    everyone = [Named("a"), rare, Named("b")]
    assert choose(everyone, None, CPU) == ([everyone[0], everyone[2]], {rare: "not on cpu"})
    assert choose(everyone, ["b"], CPU) == ([everyone[2]], {})
    with pytest.raises(UserError, match="Did you mean 'rare'"):
        choose(everyone, ["a", "rear"], CPU)
