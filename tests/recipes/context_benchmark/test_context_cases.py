"""What can be asked of recipe=long-context-benchmark, and what it then
measures; no rank is started."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashtrain.command.compose import compose_settings
from flashtrain.distributed.context import local_attention
from flashtrain.errors import UserError
from flashtrain.training.hardware import detect_hardware
from flashtrain_kernels import masks
from flashtrain_recipes.attention_benchmark.settings import MASKS
from flashtrain_recipes.benchmark_settings import BenchmarkSettings
from flashtrain_recipes.context_benchmark.baselines.flashtrain import baselines
from flashtrain_recipes.context_benchmark.cases import ContextCase, cases, heavy_tailed_lengths
from flashtrain_recipes.context_benchmark.passes import only_communicating
from flashtrain_recipes.context_benchmark.rows import extrapolated
from flashtrain_recipes.context_benchmark.run import ContextBenchmark, degrees_of
from flashtrain_recipes.context_benchmark.settings import NOT_OVER_DEVICES, parse_shape

RECIPE = "recipe=long-context-benchmark"
CPU = detect_hardware("cpu")


def asked(*words: str):
    return compose_settings([RECIPE, *words])


def case(
    mask: str = "causal", length: int = 64, shape: str = "4/2x16", degree: int = 2
) -> ContextCase:
    words = BenchmarkSettings(
        name="context", masks=[mask], seqlens=[length], shapes=[shape], dtype="float32"
    )
    (found,) = cases(words, [degree])
    return found


def test_degrees_are_those_that_the_devices_can_hold() -> None:
    assert degrees_of(asked("benchmark.degrees=[4,2]"), CPU) == [2, 4]
    with pytest.raises(UserError, match=r"benchmark\.degrees=\[2, 512\]"):
        degrees_of(asked("benchmark.degrees=[512,2]"), CPU)
    assert degrees_of(asked("benchmark.degrees=null"), CPU) == [2, 4]


def test_cases_are_every_degree_shape_mask_and_length_the_shorter_lengths_first() -> None:
    words = {"shapes": ["16x128", "32/8x128"], "masks": ["causal", "full"], "seqlens": [4096, 1024]}
    found = cases(BenchmarkSettings(name="context", **words), [2, 4])
    assert len(found) == 2 * 2 * 2 * 2
    assert str(found[0]) == "causal, 1024 tokens, 16x128, 2 ranks"
    assert str(found[-1]) == "full, 4096 tokens, 32/8x128, 4 ranks"
    assert parse_shape("32/8x128") == (32, 8, 128)


@pytest.mark.parametrize(
    "mask",
    [
        mask.replace("F-R", "24-4")
        for mask in MASKS
        if mask not in NOT_OVER_DEVICES and "-L" not in mask
    ],
)
def test_every_static_mask_has_a_mask_of_the_whole_sequence(mask: str) -> None:
    one = case(mask, 96)
    assert one.flops == 14 * 4 * 16 * int(one.mask.dense().sum())


@given(st.integers(1, 70_000), st.integers(0, 5))
def test_documents_fill_the_sequence_whatever_its_length(total: int, seed: int) -> None:
    lengths = heavy_tailed_lengths(total, seed)
    assert sum(lengths) == total
    assert min(lengths) >= 1
    assert lengths == heavy_tailed_lengths(total, seed)


def test_ulysses_computes_alike_in_every_layout_and_is_measured_in_one() -> None:
    titles = [one.title for one in baselines(["ulysses", "ring"], ["zigzag", "contiguous"])]
    assert titles == ["ulysses, zigzag", "ring, zigzag", "ring, contiguous"]


def test_communicating_alone_leaves_the_kernels_out_and_puts_them_back() -> None:
    q, k = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 2, 8)
    mask, scores = masks.causal(6), local_attention.Scores(0.3)
    real = local_attention.attention_forward, local_attention.attention_backward
    with only_communicating():
        out, lse = local_attention.forward(q, k, k, mask, scores)
        saved = local_attention.Saved(q, q, k, k, out, lse)
        dq, dk, _ = local_attention.backward(saved, mask, scores)
    assert (out.shape, lse.shape, dq.shape, dk.shape) == (q.shape, (1, 4, 6), q.shape, k.shape)
    assert not out.any()
    assert (local_attention.attention_forward, local_attention.attention_backward) == real
    assert local_attention.forward(q, k, k, mask, scores)[0].any()


def test_a_rate_is_that_of_the_longest_length_of_the_same_attention() -> None:
    every = [case(length=length) for length in (32, 64, 128)] + [case("full", 128)]
    times = ({"one_device_forward_ms": 1.0, "one_device_backward_ms": 2.0},
             {"one_device_forward_ms": 3.0, "one_device_backward_ms": 5.0})  # fmt: skip
    known = [
        {**one.columns(), **took, "one_device": "measured"}
        for one, took in zip(every[:2], times, strict=True)
    ]
    empty = {
        "one_device": "not measured",
        "efficiency": None,
        "forward_ms": 2.0,
        "backward_ms": 4.0,
    }
    longer, other = ({**one.columns(), **empty} for one in every[2:])
    found = extrapolated(longer, every[2], known, every)
    ratio = 128 * 129 / (64 * 65)
    assert found["one_device"] == "extrapolated from 64 tokens"
    assert found["one_device_forward_ms"] == pytest.approx(3 * ratio, rel=1e-3)
    assert found["efficiency"] == pytest.approx(8 * ratio / 12, rel=1e-3)
    assert extrapolated(other, every[3], known, every) == other
    assert extrapolated(known[0], every[0], known, every) == known[0]


def test_plan_lists_the_cases_what_does_not_fit_them_and_what_is_missing() -> None:
    told = ContextBenchmark(
        asked("benchmark.seqlens=[64]", "benchmark.degrees=[2]", "benchmark.dtype=float32"), CPU
    ).plan()
    assert "2 cases, 10 rounds" in told
    assert (
        "causal, 64 tokens, 16x128, 2 ranks; without hybrid, balanced (hybrid with 16 heads" in told
    )
