"""The settings `benchmark.*` of all benchmarks together."""

from __future__ import annotations

from dataclasses import dataclass, fields

from flashtrain.errors import UserError, at_least, one_of
from flashtrain.registry import registered
from flashtrain_recipes.attention_benchmark.settings import AttentionSettings
from flashtrain_recipes.context_benchmark.settings import ContextSettings
from flashtrain_recipes.step_benchmark.settings import StepSettings

_MINIMUMS = {
    **dict.fromkeys(("rounds", "max_seconds", "steps", "contexts", "batches", "samples"), 1),
    **dict.fromkeys(("seqlens", "batch", "tokens", "heads", "longest", "median_document"), 1),
    **dict.fromkeys(("warm_seconds", "one_device_longest", "check_longest"), 0),
    "degrees": 2,
}


@dataclass
class BenchmarkSettings(AttentionSettings, StepSettings, ContextSettings):
    """What a benchmark measures, by which implementations, and for how long."""

    name: str | None = None  # the benchmark to run; recipes set it
    # Names of what is measured; null: all that can run on this device.
    implementations: list[str] | None = None
    rounds: int = 10  # how often each implementation is measured; the median counts
    # Seconds after which nothing new is begun, to give a rented GPU back in time.
    max_seconds: float | None = None

    def check(self) -> None:
        if self.name is not None:
            one_of("benchmark.name", self.name, registered("benchmark"))
        # recipe=bert-speed has full rows of contexts, lengths of sample_units, or both
        may_be_empty: tuple[str, ...] = ()
        if self.name == "bert" and (self.contexts or self.sample_units):
            may_be_empty = ("contexts", "sample_units")
        for one in fields(self):
            if getattr(self, one.name) == [] and one.name not in may_be_empty:
                raise UserError(
                    f"benchmark.{one.name}=[] is empty: "
                    "name one or more values, or leave the setting out."
                )
        for setting, least in _MINIMUMS.items():
            given = getattr(self, setting)
            for number in given if isinstance(given, list) else [given]:
                at_least(f"benchmark.{setting}", number, least)
        self.check_attention()
        self.check_steps(self.name)
        self.check_context(self.masks if self.name == "context" else None)
