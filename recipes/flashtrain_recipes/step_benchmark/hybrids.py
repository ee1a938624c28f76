"""Training steps of decoders of one size whose layers differ, by context (recipe=hybrid-benchmark):
exact attention, linear layers, and a layer of attention among several linear ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtrain.models.decoder_config import DecoderConfig
from flashtrain.settings.settings import Settings
from flashtrain.tasks.text_data import vocabulary_of
from flashtrain_recipes.harness.rows import Over, Row
from flashtrain_recipes.step_benchmark.baselines.flashtrain import Flashtrain
from flashtrain_recipes.step_benchmark.cases import GPT2Case, batches_of
from flashtrain_recipes.step_benchmark.figures import RATE
from flashtrain_recipes.step_benchmark.run import GPT2Steps
from flashtrain_recipes.step_benchmark.training_step import StepBaseline

_SAME = ("model", "context", "batch", "weights")
EXACT = "full"  # the pattern that speed-ups are over


@dataclass(frozen=True)
class HybridCase(GPT2Case):
    """A decoder with layers of one pattern, whose training step is measured."""

    layers: int | None = None  # null: the size's
    family: str = "llama"
    pattern: str = EXACT  # words of model.pattern, joined by +

    @property
    def kind(self) -> tuple[Any, ...]:
        return (*super().kind, self.pattern)

    def config(self) -> DecoderConfig:
        return DecoderConfig.of_size(
            self.model,
            self.family,
            vocab_size=self.vocab_size,
            context=self.context,
            vocab_rows=self.vocab_rows,
            layers=self.layers,
            pattern=self.pattern.split("+"),
        )

    def settings_of(self, base: Settings) -> Settings:
        own = super().settings_of(base)
        own.model.pattern = self.pattern.split("+")
        return own

    def columns(self) -> Row:
        return {"pattern": self.pattern, **super().columns()}

    def __str__(self) -> str:
        return f"{self.pattern} {super().__str__()}"


class HybridSteps(GPT2Steps):
    """The benchmark of recipe=hybrid-benchmark: every pattern, context and precision."""

    columns = ("pattern", *GPT2Steps.columns, "over_exact")
    over = (Over("over_exact", RATE, _SAME, lambda row: bool(row["pattern"] == EXACT)),)

    def make_cases(self) -> list[GPT2Case]:
        options, model = self.options, self.settings.model
        sizes = vocabulary_of(self.settings.data), model.vocab_rows, model.layers, model.name
        return [
            HybridCase(size, context, batch, weights, *sizes, pattern)
            for size in options.models
            for weights in options.weights
            for context in options.contexts
            for pattern in options.patterns or ["+".join(model.pattern)]
            for batch in batches_of(options, context)
        ]

    def make_baselines(self) -> list[StepBaseline]:
        return [one for one in super().make_baselines() if isinstance(one, Flashtrain)]
