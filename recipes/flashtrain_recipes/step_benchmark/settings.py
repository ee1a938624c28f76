"""The settings of all recipes that measure whole training steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from flashtrain.errors import at_least, between, one_of
from flashtrain.settings.options import BertSize, DecoderSize, SampleUnit

WEIGHTS = ("fp32", "bf16", "bf16-master")
LORA = "-lora"  # a decoder's name ends so where adapters alone are trained
_SHAPES = "tiny llama-1b llama-3b llama-8b qwen3-8b qwen3.5-9b nemotron-3-nano-30b"
STEP_MODELS = get_args(DecoderSize)
HF_MODELS = tuple(name + end for name in _SHAPES.split() for end in ("", LORA))
# benchmark.name: the models that it can have.
MODELS = {
    "step": STEP_MODELS,
    "bert": get_args(BertSize),
    "huggingface": HF_MODELS,
    "huggingface-long": HF_MODELS,
}
# The last when named.
SEQUENCE_TASKS = ("listops", "text", "retrieval", "image", "pathfinder", "pathx", "path256")


@dataclass
class StepSettings:
    """Which training steps are measured: every combination of models, contexts and weights."""

    # The models to measure, by size or shape.
    models: list[str] = field(default_factory=lambda: ["124m", "355m"])
    # The lengths of a sequence, in tokens, to measure.
    contexts: list[int] = field(default_factory=lambda: [1024])
    # Values of model.pattern to measure, words joined by + (gla+gla+gla+full); null: model.pattern.
    patterns: list[str] | None = None
    # Numbers of sequences a step; null: as many as hold benchmark.tokens.
    batches: list[int] | None = None
    # Numbers of documents, of unequal lengths, packed in a row of recipe=hf-speed.
    documents: list[int] = field(default_factory=lambda: [1])
    # Dtypes of weights to measure: fp32 (under autocast), bf16, bf16-master (with float32 copies).
    weights: list[str] = field(default_factory=lambda: ["fp32"])
    steps: int = 10  # training steps in one sample of an implementation
    # Whether implementations that are compiled on GPUs are so here; null: on GPUs only.
    compile: bool | None = None
    # Also run `python -m flashtrain recipe=gpt2` for so many steps, 20 or more, for its cost.
    command_steps: int = 0
    optimizer_step: bool = True  # false: recipe=hf-speed measures forward and backward alone
    # The Long Range Arena's tasks that recipe=lra-speed measures; null: all but path256.
    tasks: list[str] | None = None
    # Units of text whose lengths recipe=bert-speed takes.
    sample_units: list[str] = field(default_factory=lambda: ["paragraph"])
    # How many sequences of each of benchmark.sample_units recipe=bert-speed takes.
    samples: int = 2048
    # Dropout probabilities that recipe=bert-speed measures.
    dropouts: list[float] = field(default_factory=lambda: [0.0])

    def check_steps(self, name: str | None) -> None:
        """Raise UserError for the first setting that is invalid with this benchmark.name."""
        named = {
            "models": MODELS.get(str(name), STEP_MODELS),
            "weights": WEIGHTS,
            "tasks": SEQUENCE_TASKS,
            "sample_units": get_args(SampleUnit),
        }
        for setting, possible in named.items():
            for given in getattr(self, setting) or []:
                one_of(f"benchmark.{setting}", given, possible)
        for dropout in self.dropouts:
            between("benchmark.dropouts", dropout, 0.0, 1.0, include_high=False)
        at_least("benchmark.documents", min(self.documents, default=1), 1)
        if self.command_steps:  # it logs every tenth, and the first time is left out
            at_least("benchmark.command_steps", self.command_steps, 20)
