"""Which benchmark a recipe names (benchmark.name), and how it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.arena.speed import SequenceSteps
from flashtrain_recipes.attention_benchmark.run import AttentionBenchmark
from flashtrain_recipes.benchmark_runner.run import Benchmark
from flashtrain_recipes.bert_benchmark.run import BertSteps
from flashtrain_recipes.context_benchmark.run import ContextBenchmark
from flashtrain_recipes.step_benchmark.run import GPT2Steps

_BENCHMARKS: dict[str, type[Benchmark]] = {
    "attention": AttentionBenchmark,
    "bert": BertSteps,
    "context": ContextBenchmark,
    "sequence": SequenceSteps,
    "step": GPT2Steps,
}


def benchmark(
    settings: Settings, hardware: Hardware, folder: Path, *, overrides: list[str], started: float
) -> dict[str, Any]:
    """Measure what the settings name, in `folder`, and return the summary row: see Benchmark.run."""
    return _of(settings, hardware).run(folder, overrides=overrides, started=started)


def benchmark_plan(settings: Settings, hardware: Hardware) -> str:
    """mode=plan: what would be measured, and nothing started."""
    return _of(settings, hardware).plan()


def _of(settings: Settings, hardware: Hardware) -> Benchmark:
    return _BENCHMARKS[str(settings.benchmark.name)](settings, hardware)
