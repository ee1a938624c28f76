"""recipe=lra-speed: time training steps of the Long Range Arena's tasks with dense,
block-sparse and other attention.

Model, length and batch are those of the task's recipe. Rows are random and of full length: what
padding saves is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtrain.command.compose import compose_settings
from flashtrain.data.sequences import SequenceShape
from flashtrain.models.classifier import Classifier
from flashtrain.models.classifier_config import ClassifierConfig
from flashtrain.training.gradient_clipping import clip_gradients
from flashtrain.training.optimizers import adamw
from flashtrain_recipes.arena.build import classifier_config
from flashtrain_recipes.arena.sources import make_sequence_source
from flashtrain_recipes.arena.stages import stages_of
from flashtrain_recipes.harness.rows import Over, Row
from flashtrain_recipes.step_benchmark.cases import StepCase
from flashtrain_recipes.step_benchmark.run import StepBenchmark
from flashtrain_recipes.step_benchmark.training_step import StepBaseline, TrainingStep

_DENSE, _PATTERN = "dense", "butterfly-local-global"
# The recipe that each task's model, samples and batch come from.
_OF_LRA = ("listops", "text", "retrieval", "image", "pathfinder")
_RECIPES = {**{name: f"lra-{name}" for name in _OF_LRA}, "pathx": "pathx", "path256": "path256"}
# Without path256: standard attention cannot be measured at 65,536 pixels.
_USUAL = tuple(_RECIPES)[:-1]
SPEEDUP = Over(  # over standard attention that is as compiled as the row itself
    "speedup_over_standard", "samples_per_second", ("task", "length", "batch", "compiled"),
    lambda row: bool(row.get("is_standard")),
)  # fmt: skip


@dataclass(frozen=True)
class SpeedCase(StepCase):
    """A task of the Long Range Arena, whose training step is measured."""

    model: str  # the task's name
    config: ClassifierConfig  # the model that the task's recipe trains
    batch: int
    weights: str = "fp32"

    def __str__(self) -> str:
        return f"{self.model} S={self.context} batch {self.batch}"

    @property
    def context(self) -> int:
        """S, the tokens of each sequence of a sample."""
        return self.config.length

    def flops_per_token(self) -> float:
        """Return the FLOPs per token, forward and backward, with dense attention: the
        same for every baseline."""
        with torch.device("meta"):
            dense = Classifier(replace(self.config, pattern=_DENSE), "sdpa")
        return dense.flops_per_sample() / self.context

    def columns(self) -> Row:
        return {
            "task": self.model,
            "length": self.context,
            "batch": self.batch,
            "weights": self.weights,
        }

    def rates(self, milliseconds: float, peak_flops: float | None) -> Row:
        return {"samples_per_second": round(self.batch / milliseconds * 1e3, 3)}

    def draw(self, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
        """Return random rows of full length, (B, S) or (B, 2, S), and random labels (B,)."""
        generator = torch.Generator().manual_seed(seed)
        towers = () if self.config.towers == 1 else (self.config.towers,)
        shape = (self.batch, *towers, self.context)
        tokens = torch.randint(self.config.vocab_size, shape, generator=generator).to(torch.uint8)
        labels = torch.randint(self.config.classes, (self.batch,), generator=generator)
        return tokens.to(device), labels.to(device)


@dataclass(eq=False)
class ClassifierStep(StepBaseline):
    """A baseline: the task's model with one implementation of attention."""

    name: str
    title: str
    attention: str
    compiled: bool = False
    # Use the block pattern of the task's recipe, or butterfly-local-global where it has none.
    sparse: bool = False

    def columns(self, case: SpeedCase | None) -> Row:
        return {
            **super().columns(case),
            "compiled": self.compiled,
            "is_standard": self.attention == "standard",
        }

    def build(self, case: Any, device: torch.device) -> TrainingStep:
        own = case.config.pattern
        pattern = (own if own != _DENSE else _PATTERN) if self.sparse else _DENSE
        config = replace(case.config, pattern=pattern)
        torch.manual_seed(0)
        attention = self.attention if device.type == "cuda" or self.attention != "flash" else "sdpa"
        model = Classifier(config, attention).to(device)
        losses = model.losses
        if self.compiled:
            losses = torch.compile(losses, dynamic=False, fullgraph=True)
        optimizer = adamw(model, lr=1e-4)
        return TrainingStep(
            model,
            lambda tokens, labels: losses(tokens, labels).classification,
            optimizer,
            partial(clip_gradients, model, 1.0, optimizer=optimizer),
            autocast=torch.bfloat16 if device.type == "cuda" else None,
        )


class SequenceSteps(StepBenchmark):
    """The benchmark of training steps on the Arena's tasks: each of benchmark.tasks, with every
    implementation of attention."""

    what = "training speed of the Long Range Arena, over standard attention"
    columns = (
        "task", "length", "batch", "implementation", "samples_per_second", "peak_memory_gib",
        "milliseconds",
        "speedup_over_standard",
    )  # fmt: skip
    rate = "samples_per_second"
    over = (SPEEDUP,)

    def make_cases(self) -> list[SpeedCase]:
        """Return a case for each task of benchmark.tasks and each batch size; samples are cut to
        benchmark.longest tokens."""
        options, found = self.options, []
        for name in options.tasks or _USUAL:
            stage = stages_of(compose_settings([f"recipe={_RECIPES[name]}"]))[-1]
            shape = make_sequence_source(stage.settings, fixed=True).shape
            if options.longest is not None and shape.length > options.longest:
                side = None if shape.side is None else int(options.longest**0.5)
                length = options.longest if side is None else side * side
                shape = SequenceShape(shape.classes, length, shape.vocab_size, side, shape.towers)
            config = classifier_config(stage.settings.classifier, shape)
            found += [SpeedCase(name, config, batch) for batch in options.batches or [stage.batch]]
        return found

    def make_baselines(self) -> list[ClassifierStep]:
        kinds = [
            ("flash", "flashtrain", "flash", False),
            ("block-sparse", "flashtrain, block-sparse", "flash", True),
            ("sdpa", "PyTorch SDPA", "sdpa", False),
            ("standard", "standard attention", "standard", False),
        ]
        return [
            ClassifierStep(
                name if is_compiled else f"{name}-eager",
                title if is_compiled else f"{title}, eager",
                attention=attention,
                compiled=is_compiled,
                sparse=sparse,
            )
            for is_compiled in ((True, False) if self.compiled else (False,))
            for name, title, attention, sparse in kinds
        ]
