"""mode=benchmark: its entry points for a run, and which settings each benchmark uses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtrain.errors import UserError
from flashtrain.mode import Mode
from flashtrain.registry import component
from flashtrain.settings.settings import Settings

if TYPE_CHECKING:
    from flashtrain.training.hardware import Hardware


_EVERY = "implementations rounds max_seconds"
_STEPS = "models contexts batches weights steps compile tokens"
# benchmark.name: those of its settings that it uses.
_READ = {
    "attention": f"{_EVERY} rows seqlens batch tokens heads head_dims masks densities dtype "
    "longest warm_seconds reference",
    "step": f"{_EVERY} {_STEPS} command_steps",
    "hybrid": f"{_EVERY} {_STEPS} patterns",
    "bert": f"{_EVERY} {_STEPS} sample_units samples dropouts",
    "sequence": f"{_EVERY} tasks batches steps compile longest",
    "huggingface": f"{_EVERY} {_STEPS} documents optimizer_step",
    "huggingface-long": "max_seconds models contexts steps",
    "context": f"{_EVERY} seqlens masks dtype longest reference shapes methods layouts degrees "
    "one_device_longest check_longest median_document mixers",
}
# ... and those of a training that it uses too.
_STEP = "data optimizer trainer.cuda_graphs model memory"
_TRAINED = {
    "step": _STEP,
    "hybrid": _STEP,
    "huggingface": _STEP,
    "huggingface-long": (
        f"{_STEP} context_parallel trainer.devices trainer.strategy "
        "trainer.context_parallel_method trainer.context_parallel_layout "
        "trainer.context_parallel_groups "
        "trainer.timeout_seconds trainer.compile"
    ),
    "bert": "data optimizer trainer.cuda_graphs bert.family bert.activation masked",
}


class Benchmark(Mode):
    """mode=benchmark: runs the benchmark that the setting benchmark.name selects."""

    measures = True
    own = ("benchmark",)
    requested_by = "benchmark.name"
    example = ("recipe=gpt2-speed", "a recipe that measures: one table, baselines in turns")

    def uses(self, settings: Settings) -> list[str]:
        options = settings.benchmark
        known = _READ.get(str(options.name))  # None: a benchmark that a program registered
        read = "benchmark"
        if known is not None:
            read = " ".join(f"benchmark.{name}" for name in known.split())
        context = " context" if options.name == "bert" and not options.contexts else ""
        return (
            f"output benchmark.name {_TRAINED.get(str(options.name), '')}{context} {read}".split()
        )

    def check(self, settings: Settings) -> None:
        if settings.benchmark.name is None:
            raise UserError(
                f"mode=benchmark: recipe={settings.recipe} trains a model. "
                "Expected a recipe that sets benchmark.name, as recipe=attention-benchmark."
            )

    def plan(self, settings: Settings, hardware: Hardware) -> str:
        return str(_named(settings, hardware).plan())

    def run(
        self, settings: Settings, hardware: Hardware, folder: Path, **command: Any
    ) -> dict[str, Any]:
        return dict(_named(settings, hardware).run(folder, **command))

    def demo_line(self, demo: Settings, where: str) -> str:
        most = (
            f", for {demo.benchmark.max_seconds:g} s at most" if demo.benchmark.max_seconds else ""
        )
        does = "planning" if demo.mode == "plan" else "measuring"
        return f"{does} a small selection of the recipe{most}. For the recipe in full, {where}"


def _named(settings: Settings, hardware: Hardware) -> Any:
    return component("benchmark", str(settings.benchmark.name))(settings, hardware)
