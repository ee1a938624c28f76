"""Which benchmark a recipe names (benchmark.name), and how it starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.arena.speed import benchmark_sequences, plan_sequences
from flashtrain_recipes.attention_benchmark.run import benchmark_attention, plan_attention
from flashtrain_recipes.bert_benchmark.measure import benchmark_bert, plan_bert
from flashtrain_recipes.context_benchmark.run import benchmark_context, plan_context
from flashtrain_recipes.step_benchmark.run import benchmark_steps, plan_steps


class _Measure(Protocol):
    def __call__(
        self, settings: Settings, hardware: Hardware, folder: Path, *, overrides: list[str], started: float
    ) -> dict[str, Any]: ...


class _Benchmark(NamedTuple):
    measure: _Measure
    plan: Callable[[Settings, Hardware], str]


_BENCHMARKS = {
    "attention": _Benchmark(benchmark_attention, plan_attention),
    "bert": _Benchmark(benchmark_bert, plan_bert),
    "context": _Benchmark(benchmark_context, plan_context),
    "sequence": _Benchmark(benchmark_sequences, plan_sequences),
    "step": _Benchmark(benchmark_steps, plan_steps),
}


def benchmark(
    settings: Settings, hardware: Hardware, folder: Path, *, overrides: list[str], started: float
) -> dict[str, Any]:
    """Measure what the settings name, in `folder`, and return the summary row.

    started: time.time() at the command's start, from which benchmark.max_seconds counts. Raises UserError for what the
    user can mend, Stopped after a signal; the rows until then are in result.json.
    """
    return _of(settings).measure(settings, hardware, folder, overrides=overrides, started=started)


def benchmark_plan(settings: Settings, hardware: Hardware) -> str:
    """mode=plan: what would be measured, and nothing started."""
    return _of(settings).plan(settings, hardware)


def _of(settings: Settings) -> _Benchmark:
    return _BENCHMARKS[str(settings.benchmark.name)]
