"""Who heeds `benchmark.*`: each benchmark its own settings, and those of a preset or a list only where these ask."""

from __future__ import annotations

from dataclasses import fields

from flashtrain.heeded import Condition, Rule
from flashtrain.settings.settings import Settings
from flashtrain_recipes.attention_benchmark.settings import BenchmarkSettings

_EVERY = "implementations rounds max_seconds"
_STEPS = "models contexts batches weights steps compile tokens"
# benchmark.name: the settings that it reads.
_READ = {
    "attention": f"{_EVERY} rows seqlens batch tokens heads kv_heads head_dims masks densities dropout dtype "
    "directions longest reference",
    "step": f"{_EVERY} {_STEPS} command_steps",
    "bert": f"{_EVERY} {_STEPS} units samples dropouts",
    "sequence": f"{_EVERY} tasks batches steps compile longest",
    "context": f"{_EVERY} seqlens heads kv_heads head_dims masks dtype longest reference shapes ways layouts degrees "
    "one_device_longest check_longest min_seconds",
}
_RECIPES = {
    "attention": "attention-benchmark",
    "step": "gpt2-speed, context-speed",
    "bert": "bert-speed",
    "sequence": "lra-speed",
    "context": "long-context-benchmark",
}


def _of_benchmarks(setting: str) -> Rule:
    names = [name for name, read in _READ.items() if setting in read.split()]
    recipes = ", ".join(_RECIPES[name] for name in names)
    return Rule(
        f"benchmark.{setting}", lambda settings: settings.benchmark.name in names, f"mode=benchmark of recipe={recipes}"
    )


def _rows(*presets: str) -> Condition:
    """Of the attention benchmark, whose rows these presets are; of other benchmarks always."""
    return lambda settings: settings.benchmark.name != "attention" or settings.benchmark.rows in presets


def _random_blocks(settings: Settings) -> bool:
    asked = settings.benchmark
    return asked.rows == "block-sparse" or (asked.rows == "grid" and "block-random" in (asked.masks or []))


def _no_batch(settings: Settings) -> bool:
    return not settings.benchmark.batches and not settings.benchmark.batch


RULES = (
    *(_of_benchmarks(field.name) for field in fields(BenchmarkSettings) if field.name != "name"),
    Rule("benchmark", lambda settings: settings.benchmark.name is not None, "recipes with mode=benchmark"),
    Rule("benchmark.batch benchmark.kv_heads benchmark.dropout", _rows("grid"), "benchmark.rows=grid"),
    Rule("benchmark.heads", _rows("grid", "features", "block-sparse"), "benchmark.rows=grid, features, block-sparse"),
    Rule("benchmark.densities", _random_blocks, "benchmark.rows=block-sparse, and benchmark.masks=[block-random]"),
    Rule("benchmark.tokens", _rows("grid", "block-sparse"), "benchmark.rows=grid, block-sparse"),
    Rule(
        "benchmark.tokens",
        _no_batch,
        "cases whose batch is not named: add benchmark.batches=null, or leave benchmark.batch out",
    ),
    Rule(
        "benchmark.heads benchmark.kv_heads benchmark.head_dims",
        lambda settings: not settings.benchmark.shapes,
        "cases without benchmark.shapes, which say all three",
    ),
    Rule("benchmark.samples", lambda settings: bool(settings.benchmark.units), "benchmark.units=[paragraph]"),
)
