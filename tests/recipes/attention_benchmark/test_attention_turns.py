"""One case measured by made-up baselines: columns, errors, failures, plans; and as
called, features and caches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashtrain_recipes.attention_benchmark.baselines.pytorch import Standard
from flashtrain_recipes.attention_benchmark.cases import Case
from flashtrain_recipes.attention_benchmark.turns import AttentionTurns
from flashtrain_recipes.harness.clock import Clock, Pace, Timed
from flashtrain_recipes.harness.turns import Effort

CASE = Case(2, 2, 32, 16, "causal", dtype_name="float32")
CALLED = replace(CASE, batch=1, as_called=True)
COLUMNS = {
    "implementation", "direction", "batch", "seqlen_q", "seqlen_k", "heads", "kv_heads", "head_dim",
    "mask", "dropout",
    "dtype", "milliseconds", "host_us", "tflops", "peak_memory_mib", "error",
}  # fmt: skip


class Named(Standard):
    """Standard attention under another title, which does not mind features."""

    supports = ("dropout", "softcap", "deterministic", "pages")

    def __init__(self, title: str) -> None:
        self.name = self.title = title


class Failing(Named):
    """Raises in its backward pass, or already in its forward pass."""

    def attend(self, case, context):
        inner = super().attend(case, context)

        def attention(inputs):
            if self.title == "forward":
                raise ValueError("head_dim 16 is\nnot supported")
            out = inner(inputs)
            out.register_hook(self._raise)
            return out

        return attention

    def _raise(self, _):
        raise torch.OutOfMemoryError("CUDA out of memory")


class Planning(Named):
    def plan(self, case, context):
        return lambda: None


class OneSample(Clock):
    """A clock that counts samples instead of taking time. A call by itself takes longer
    the wider its heads are."""

    def calibrate(self, launches):
        launches[0]()
        return Pace(1)

    def queued(self, launches, pace):
        launches[0]()
        return Timed(2.0, 2000.0)

    def called(self, launches, pace):
        out = launches[0]()
        return Timed(out.shape[-1] / 8 if isinstance(out, torch.Tensor) else 4.0, 30.0)

    def peak_mib(self, call):
        call()
        return 3.0


def measure(*baselines, case: Case = CASE, check: bool = True):
    notes: list[tuple[str, str]] = []
    one = AttentionTurns(
        case, check=check, device=torch.device("cpu"), clock=OneSample(), seed=0, effort=Effort(3),
        note=lambda title, reason: notes.append((title, reason)),
    )  # fmt: skip
    return one.run(baselines), notes


def test_each_baseline_has_a_row_a_direction_with_every_column() -> None:
    rows, notes = measure(Named("a"), Named("b"))
    assert [(row["implementation"], row["direction"]) for row in rows] == [
        ("a", "forward"), ("a", "backward"), ("b", "forward"), ("b", "backward")
    ]  # fmt: skip
    assert all(set(row) == COLUMNS for row in rows)
    assert notes == []
    assert rows[0]["tflops"] == pytest.approx(
        4 * 2 * 2 * (32 * 32 / 2) * 16 / 2e-3 / 1e12, abs=5e-4
    )
    assert (rows[0]["milliseconds"], rows[0]["host_us"], rows[0]["peak_memory_mib"]) == (
        2.0,
        2000.0,
        3.0,
    )
    assert all(row["error"] < 1e-5 for row in rows)
    assert {row["error"] for row in measure(Named("a"), check=False)[0]} == {None}


def test_what_fails_is_a_row_of_each_direction_without_a_figure() -> None:
    rows, _ = measure(Failing("forward"), Failing("backward"))
    found = {
        (row["implementation"], row["direction"]): (row.get("status"), row["error"]) for row in rows
    }
    assert (
        found["forward", "forward"] == found["forward", "backward"] == ("failed", "head_dim 16 is")
    )
    assert found["backward", "backward"] == ("out of memory", None)
    assert found["backward", "forward"][0] is None
    assert all(row["milliseconds"] is None for row in rows if row.get("status"))


def test_dropout_has_no_reference() -> None:
    rows, _ = measure(Named("a"), case=replace(CASE, dropout=0.5))
    assert [row["error"] for row in rows] == [None, None]


def test_a_mask_with_a_plan_gets_a_row_for_it() -> None:
    rows, _ = measure(
        Planning("a"), case=Case(1, 2, 64, 16, "prefix-lm", plans=True, dtype_name="float32")
    )
    plan = next(row for row in rows if row["direction"] == "plan")
    assert (plan["milliseconds"], plan["tflops"], plan["error"]) == (2.0, None, None)
    assert 0.5 < plan["density"] < 0.6


def test_as_called_a_row_has_the_calls_own_time_and_the_processors() -> None:
    rows, _ = measure(Named("a"), case=CALLED)
    assert [(row["part"], row["direction"], row["milliseconds"],
        row["host_us"]) for row in rows] == [
        ("calls", "forward", 2.0, 30.0), ("calls", "backward", 4.0, 30.0)
    ]  # fmt: skip


def test_a_features_speed_is_compared_with_the_plain_calls() -> None:
    rows, _ = measure(
        Named("a"),
        case=replace(CALLED, softcap=2.0, features=("deterministic",), plain_head_dim=16),
    )
    assert {(row["features"], row["of_plain"]) for row in rows} == {
        ("softcap 2, deterministic", 1.0)
    }
    narrow, _ = measure(Named("a"), case=replace(CALLED, head_dim=8, plain_head_dim=16))
    # half the work: forward in half of the time, backward, on this clock, in the same
    assert [(row["head_dim"], row["of_plain"]) for row in narrow] == [(8, 1.0), (8, 0.5)]


def test_decoding_has_no_backward_and_a_rate_at_which_it_reads_the_cache() -> None:
    cache = Case(
        2, 4, 1, 16, "full", kv_heads=2, seqlen_k=512, page=0, dtype_name="float32", as_called=True
    )
    (row,), _ = measure(Named("a"), case=cache)
    assert (row["part"], row["cache"], row["gpu_milliseconds"]) == ("decoding", "contiguous", 2.0)
    assert row["gb_per_second"] == pytest.approx(2 * 2 * 512 * 2 * 16 * 4 / 2e-3 / 1e9, abs=1e-6)
    assert row["bandwidth_share"] == pytest.approx(row["gb_per_second"] / 4200, abs=1e-6)
