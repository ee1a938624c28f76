"""mode=benchmark: what is measured instead of trained, as a run asks for it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtrain.errors import UserError
from flashtrain.settings.settings import Settings
from flashtrain.spec import Mode

if TYPE_CHECKING:
    from flashtrain.training.hardware import Hardware


class Benchmark(Mode):
    """The benchmark that benchmark.name says, of a recipe that measures."""

    measures = True

    def heeds(self, settings: Settings) -> Collection[str]:
        asked = settings.benchmark
        both = {"data", "optimizer", "trainer", "trainer.cuda_graphs"}
        if asked.name == "step":
            return both | {"model", "memory"}
        if asked.name == "bert":
            return both | {"bert"} | (set() if asked.contexts else {"context"})
        return ()

    def runs_a_training(self, settings: Settings) -> bool:
        return settings.benchmark.name == "step" and settings.benchmark.command_steps > 0

    def is_asked(self, settings: Settings) -> bool:
        return settings.benchmark.name is not None

    def check(self, settings: Settings) -> None:
        degree = settings.context_parallel
        if settings.mode == "benchmark" and degree is not None and degree > 1:
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
        from flashtrain_recipes.attention_benchmark.start import benchmark_plan

        return benchmark_plan(settings, hardware)

    def run(
        self, settings: Settings, hardware: Hardware, folder: Path, *, overrides: list[str], started: float
    ) -> dict[str, Any]:
        from flashtrain_recipes.attention_benchmark.start import benchmark

        return benchmark(settings, hardware, folder, overrides=overrides, started=started)

    def demo_line(self, demo: Settings, where: str) -> str:
        asked = demo.benchmark
        limit = f", {asked.max_seconds:g} s at most" if asked.max_seconds else ""
        if asked.name == "step":
            sizes = f"{', '.join(asked.models)}, contexts to {max(asked.contexts):,}"
            return f"measuring steps of a small model ({sizes}{limit}). For the recipe in full, {where}"
        if asked.name == "bert":
            return (
                f"measuring steps of a small BERT ({', '.join(asked.models)}{limit}). For the recipe in full, {where}"
            )
        if asked.name == "context":
            lengths = ", ".join(map(str, asked.seqlens or []))
            return (
                f"measuring two processes that share short sequences ({lengths} tokens, {asked.dtype}{limit}). "
                f"For the recipe in full, {where}"
            )
        if asked.name == "sequence":
            return f"measuring sequences of up to {asked.longest} tokens. For the recipe in full, {where}"
        limits = [f"lengths to {asked.longest}" if asked.longest else "", asked.dtype, limit.removeprefix(", ")]
        told = ", ".join(part for part in limits if part)
        return f"measuring small shapes through torch's CPU backends ({told}). For the recipe in full, {where}"
