"""The settings of the recipes that measure whole training steps: of GPT-2, BERT, transformers' decoders and the Long
Range Arena.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flashtrain.errors import at_least, between, one_of

WEIGHTS = ("fp32", "bf16", "bf16-master")
LORA = "-lora"  # a decoder's name ends so where adapters alone are trained
_DECODERS = ("tiny", "llama-1b", "llama-3b", "llama-8b", "qwen3-8b")
HF_MODELS = tuple(name + end for name in _DECODERS for end in ("", LORA))
STEP_MODELS = ("demo", "124m", "355m", "774m", "1.3b", "1.5b")
BERT_MODELS = ("tiny", "base", "large")
# benchmark.name: the models that it can have.
MODELS = {"step": STEP_MODELS, "bert": BERT_MODELS, "huggingface": HF_MODELS, "huggingface-long": HF_MODELS}
BERT_UNITS = ("sentence", "paragraph", "document")
SEQUENCE_TASKS = ("listops", "text", "retrieval", "image", "pathfinder", "pathx", "path256")  # the last when named


@dataclass
class StepSettings:
    """models, contexts, weights: every combination is measured. weights: "fp32" computes in autocast's bfloat16, "bf16"
    holds weights and optimiser states in bfloat16, "bf16-master" has float32 copies of them beside. batches: sequences
    a step, each implementation is told at its best one; None: as many as hold `tokens` together. steps: of one turn of
    an implementation. compile: whether implementations that are compiled may be; None: on GPUs only. command_steps:
    steps for which `python -m flashtrain recipe=gpt2` is run beside the bare loop, 20 or more, to tell what its data
    and logging cost; 0: not. updates: of recipe=hf-speed; false measures forward and backward alone.
    tasks: of recipe=lra-speed (None: all). units, samples: of recipe=bert-speed: besides full rows of `contexts`, so
    many sequences of the lengths that these units of the text have; dropouts: each measured.
    """

    models: list[str] = field(default_factory=lambda: ["124m", "355m"])
    contexts: list[int] = field(default_factory=lambda: [1024])
    batches: list[int] | None = None
    weights: list[str] = field(default_factory=lambda: ["fp32"])
    steps: int = 10
    compile: bool | None = None
    command_steps: int = 0
    updates: bool = True
    tasks: list[str] | None = None
    units: list[str] = field(default_factory=lambda: ["paragraph"])
    samples: int = 2048
    dropouts: list[float] = field(default_factory=lambda: [0.0])

    def check_steps(self, name: str | None) -> None:
        """Raise UserError for the first of these settings that cannot be. name: benchmark.name."""
        named = {
            "models": MODELS.get(str(name), STEP_MODELS),
            "weights": WEIGHTS,
            "tasks": SEQUENCE_TASKS,
            "units": BERT_UNITS,
        }
        for setting, possible in named.items():
            for given in getattr(self, setting) or []:
                one_of(f"benchmark.{setting}", given, possible)
        for dropout in self.dropouts:
            between("benchmark.dropouts", dropout, 0.0, 1.0, include_high=False)
        if self.command_steps:  # it logs every tenth, and the first time is left out
            at_least("benchmark.command_steps", self.command_steps, 20)
