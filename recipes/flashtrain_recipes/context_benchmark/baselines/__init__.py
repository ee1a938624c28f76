"""What is measured: a file each."""

from __future__ import annotations

from flashtrain_recipes.context_benchmark.baseline import ContextBaseline
from flashtrain_recipes.context_benchmark.baselines import flashtrain, plain_all_gather, torch_context_parallel
from flashtrain_recipes.harness.settings import BenchmarkSettings


def everyone(asked: BenchmarkSettings) -> list[ContextBaseline]:
    """In the order of the tables; of flashtrain the ways and layouts asked for."""
    ours = flashtrain.baselines(asked.ways, asked.layouts)
    return [*ours, *plain_all_gather.BASELINES, *torch_context_parallel.BASELINES]
