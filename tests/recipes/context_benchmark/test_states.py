"""Layers with states in recipe=long-context-benchmark; no rank is started."""

from __future__ import annotations

import torch

from flashtrain.command.compose import compose_settings
from flashtrain.training.hardware import detect_hardware
from flashtrain_recipes.attention_benchmark.inputs import make_sets
from flashtrain_recipes.context_benchmark.run import ContextBenchmark

WORDS = (
    "recipe=long-context-benchmark", "benchmark.mixers=[delta,gla]", "benchmark.degrees=[2,4]",
    "benchmark.shapes=[4x16]", "benchmark.seqlens=[96]", "benchmark.dtype=float32",
)  # fmt: skip


def benchmark(*words: str) -> ContextBenchmark:
    return ContextBenchmark(compose_settings([*WORDS, *words]), detect_hardware("cpu"))


def test_layers_with_states_are_measured_instead_of_attention() -> None:
    one = benchmark()
    assert [str(case) for case in one.cases] == [
        f"{mixer}, 96 tokens, 4x16, {degree} ranks"
        for degree in (2, 4)
        for mixer in ("delta", "gla")
    ]
    assert {baseline.layout for baseline in one.baselines} == {"contiguous", "zigzag"}
    (zigzag,) = benchmark("benchmark.layouts=[zigzag]").baselines
    assert zigzag.layout == "zigzag"


def test_what_a_layer_computes_is_compared_with_float64() -> None:
    device = torch.device("cpu")
    for case in benchmark("benchmark.degrees=[2]").cases:
        (inputs,) = make_sets(case.attention, device, 0, 0)
        leaves = [inputs.q, inputs.k, inputs.v]
        out = case.attend(device)(inputs)
        expected = case.expected(inputs, device)
        assert expected.error(out.detach()) < 1e-5
        gradients = torch.autograd.grad(out, leaves, inputs.dout)
        assert expected.gradient_error(*gradients) < 1e-5
