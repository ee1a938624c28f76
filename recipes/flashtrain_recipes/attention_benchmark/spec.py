"""mode=benchmark: what is measured instead of trained, as a run asks for it, and who heeds `benchmark.*`: each
benchmark its own settings, and those of a preset or a list only where these ask.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtrain.errors import UserError
from flashtrain.registry import component
from flashtrain.settings.settings import Settings
from flashtrain.spec import Condition, Mode, Rule
from flashtrain_recipes.harness.settings import BenchmarkSettings

if TYPE_CHECKING:
    from flashtrain.training.hardware import Hardware


class Benchmark(Mode):
    """The benchmark that benchmark.name says, of a recipe that measures."""

    measures = True

    def heeds(self, settings: Settings) -> Collection[str]:
        asked = settings.benchmark
        both = {"data", "optimizer", "trainer", "trainer.cuda_graphs"}
        if asked.name in ("step", "huggingface"):
            return both | {"model", "memory"}
        if asked.name == "huggingface-long":
            own = {"context_parallel", "trainer.devices", "trainer.compile", "hardware.precision"}
            return both | own | {"model", "memory"}
        if asked.name == "bert":
            return both | {"bert"} | (set() if asked.contexts else {"context"})
        return ()

    def runs_a_training(self, settings: Settings) -> bool:
        return settings.benchmark.name == "step" and settings.benchmark.command_steps > 0

    def is_asked(self, settings: Settings) -> bool:
        return settings.benchmark.name is not None

    def check(self, settings: Settings) -> None:
        degree = settings.context_parallel
        shares = settings.benchmark.name == "huggingface-long"
        if settings.mode == "benchmark" and degree is not None and degree > 1 and not shares:
            raise UserError(
                f"context_parallel={degree} is for trainings: recipe=long-context-benchmark measures it with "
                f"benchmark.degrees=[{degree}]."
            )
        asked = settings.benchmark.name is not None
        if settings.mode == "benchmark" and not asked:
            raise UserError(
                f"mode=benchmark: recipe={settings.recipe} trains a model; recipe=attention-benchmark measures."
            )
        if asked and settings.mode not in ("benchmark", "plan"):
            raise UserError(
                f"recipe={settings.recipe} measures and trains nothing: mode={settings.mode} must be benchmark or plan."
            )

    def plan(self, settings: Settings, hardware: Hardware) -> str:
        return str(_named(settings, hardware).plan())

    def run(
        self, settings: Settings, hardware: Hardware, folder: Path, *, overrides: list[str], started: float
    ) -> dict[str, Any]:
        row: dict[str, Any] = _named(settings, hardware).run(folder, overrides=overrides, started=started)
        return row

    def demo_line(self, demo: Settings, where: str) -> str:
        limit = demo.benchmark.max_seconds
        most = f", for {limit:g} s at most" if limit else ""
        return f"measuring a small selection of the recipe{most}. For the recipe in full, {where}"


def _named(settings: Settings, hardware: Hardware) -> Any:
    """What benchmark.name names: a harness.benchmark.Benchmark."""
    return component("benchmark", str(settings.benchmark.name))(settings, hardware)


_EVERY = "implementations rounds max_seconds"
_STEPS = "models contexts batches weights steps compile tokens"
# benchmark.name: the settings that it reads.
_READ = {
    "attention": f"{_EVERY} rows seqlens batch tokens heads head_dims masks densities dtype "
    "longest warm_seconds reference",
    "step": f"{_EVERY} {_STEPS} command_steps",
    "bert": f"{_EVERY} {_STEPS} units samples dropouts",
    "sequence": f"{_EVERY} tasks batches steps compile longest",
    "huggingface": f"{_EVERY} {_STEPS} updates",
    "huggingface-long": "max_seconds models contexts steps",
    "context": f"{_EVERY} seqlens masks dtype longest reference shapes ways layouts degrees "
    "one_device_longest check_longest",
}
_RECIPES = {
    "attention": "attention-benchmark",
    "step": "gpt2-speed, context-speed",
    "bert": "bert-speed",
    "sequence": "lra-speed",
    "context": "long-context-benchmark",
    "huggingface": "hf-speed",
    "huggingface-long": "hf-long",
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
    Rule("benchmark.batch", _rows("grid"), "benchmark.rows=grid"),
    Rule("benchmark.heads", _rows("grid", "features", "block-sparse"), "benchmark.rows=grid, features, block-sparse"),
    Rule("benchmark.warm_seconds", _rows("as-called"), "benchmark.rows=as-called"),
    Rule("benchmark.densities", _random_blocks, "benchmark.rows=block-sparse, and benchmark.masks=[block-random]"),
    Rule("benchmark.tokens", _rows("grid", "block-sparse"), "benchmark.rows=grid, block-sparse"),
    Rule(
        "benchmark.tokens",
        _no_batch,
        "cases whose batch is not named: add benchmark.batches=null, or leave benchmark.batch out",
    ),
    Rule("benchmark.samples", lambda settings: bool(settings.benchmark.units), "benchmark.units=[paragraph]"),
)
