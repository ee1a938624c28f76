"""recipe=lra-speed: training speed of every task of the Long Range Arena by attention, all taking turns.

Dense flash attention, block-sparse, torch's SDPA and standard attention, compiled where that is wanted and eager, with
the model, length and batch of the task's recipe. Rows are random and of full length: what padding saves is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtrain.command.compose import settings_of_recipe
from flashtrain.data.sequences import SequenceShape
from flashtrain.models.classifier import Classifier
from flashtrain.models.classifier_config import ClassifierConfig
from flashtrain.report.table import Table
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain.training.optimizers import adamw
from flashtrain.training.steps import clip_gradients
from flashtrain_recipes.arena.accuracy import mean_speedups, speed_rows, speed_tables
from flashtrain_recipes.arena.build import classifier_config
from flashtrain_recipes.arena.stages import stages_of
from flashtrain_recipes.benchmark_runner.measuring import Row
from flashtrain_recipes.benchmark_runner.run import Run
from flashtrain_recipes.step_benchmark.run import StepBenchmark
from flashtrain_recipes.step_benchmark.training_step import Contender, TrainingStep

_DENSE, _PATTERN = "dense", "butterfly-local-global"


@dataclass(frozen=True)
class SpeedCase:
    """model: the task's name. config: what recipe=lra-... trains. batch: its batch. (What a StepCase has, too.)"""

    model: str
    config: ClassifierConfig
    batch: int
    weights: str = "fp32"

    def __str__(self) -> str:
        return f"{self.model} S={self.context}"

    @property
    def context(self) -> int:
        """S, of each sequence of a sample."""
        return self.config.length

    def flops_per_token(self) -> float:
        """Model FLOPs of a token's forward and backward under dense attention: one measure for all."""
        return _flops(replace(self.config, pattern=_DENSE)) / self.context

    def draw(self, batch: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
        """Random rows of full length (B, S) or (B, 2, S), and labels (B,)."""
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, self.context) if self.config.towers == 1 else (batch, self.config.towers, self.context)
        tokens = torch.randint(self.config.vocab_size, shape, generator=generator).to(torch.uint8)
        labels = torch.randint(self.config.classes, (batch,), generator=generator)
        return tokens.to(device), labels.to(device)


class ClassifierStep(Contender):
    """The task's model with one attention. sparse: by the block pattern of the task's recipe, or a usual one."""

    def __init__(self, name: str, title: str, *, attention: str, compiled: bool, sparse: bool = False) -> None:
        self.name, self.title, self.attention = name, title, attention
        self.compiled, self.sparse = compiled, sparse

    def build(self, case: Any, batch: int, device: torch.device) -> TrainingStep:
        own = case.config.pattern
        pattern = (own if own != _DENSE else _PATTERN) if self.sparse else _DENSE
        config = replace(case.config, pattern=pattern)
        torch.manual_seed(0)
        attention = self.attention if device.type == "cuda" or self.attention != "flash" else "sdpa"
        model = Classifier(config, attention).to(device)
        losses = torch.compile(model.losses, dynamic=False, fullgraph=True) if self.compiled else model.losses
        return TrainingStep(
            model,
            partial(_loss, losses),
            adamw(model, lr=1e-4),
            partial(clip_gradients, model, 1.0),
            autocast=torch.bfloat16 if device.type == "cuda" else None,
        )


def _loss(losses: Callable[..., Any], tokens: Tensor, labels: Tensor) -> Tensor:
    return losses(tokens, labels).classification


def _flops(config: ClassifierConfig) -> float:
    with torch.device("meta"):
        return Classifier(config, "sdpa").flops_per_sample()


# The recipe that each task's model and batch come from, and what its samples are.
_TASKS = {
    "listops": ("lra-listops", SequenceShape(classes=10, length=2000, vocab_size=16)),
    "text": ("lra-text", SequenceShape(classes=2, length=4096)),
    "retrieval": ("lra-retrieval", SequenceShape(classes=2, length=4000, towers=2)),
    "image": ("lra-image", SequenceShape(classes=10, length=1024, side=32)),
    "pathfinder": ("lra-pathfinder", SequenceShape(classes=2, length=1024, side=32)),
    "pathx": ("pathx", SequenceShape(classes=2, length=16384, side=128)),
    "path256": ("path256", SequenceShape(classes=2, length=65536, side=256)),
}
_USUAL = tuple(_TASKS)[:-1]  # standard attention has no figure at 65,536 pixels


class SequenceSteps(StepBenchmark):
    """The tasks that benchmark.tasks names, by attention."""

    def __init__(self, settings: Settings, hardware: Hardware) -> None:
        super().__init__(settings, hardware)
        self.todo: list[SpeedCase] = cases(settings)

    def everyone(self, compiled: bool) -> list[ClassifierStep]:
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
            for is_compiled in ((True, False) if compiled else (False,))
            for name, title, attention, sparse in kinds
        ]

    def line(self) -> str:
        names = "; ".join(contender.title for contender in self.contenders)
        tasks = ", ".join(case.model for case in self.todo)
        return f"training steps of {tasks}: {self.asked.rounds} rounds on {self.hardware.name}: {names}"

    def batches_of(self, case: SpeedCase) -> list[int]:
        """The batches asked for, or the one of the task's recipe."""
        return sorted(set(self.asked.batches)) if self.asked.batches else [case.batch]

    def row(self, row: Row, case: SpeedCase, batches: Sequence[int]) -> Row:
        """A row of StepMeasurement in this table's words."""
        contender = next(one for one in self.contenders if one.title == row["implementation"])
        told = {key: value for key, value in row.items() if key not in ("model", "context", "tokens_per_second", "mfu")}
        rate = row.get("tokens_per_second")
        return {
            "implementation": row["implementation"],
            "task": row["model"],
            "length": row["context"],
            **told,
            "samples_per_second": None if not rate else round(rate / row["context"], 3),
            "compiled": contender.compiled,
            "is_standard": contender.attention == "standard",
        }

    def told(self, rows: Sequence[Row]) -> str:
        told = [
            f"{row['implementation']} {row['samples_per_second']:,.1f}" for row in rows if row["samples_per_second"]
        ]
        return f"samples/s: {'; '.join(told)}"

    def completed(self, run: Run) -> list[Row]:
        return speed_rows(run.rows)

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        return speed_tables(rows)

    def best(self, rows: Sequence[Row]) -> dict[str, float]:
        """The mean speed-up of each implementation."""
        return {f"mean_speedup_{row['implementation']}": row["mean_speedup"] for row in mean_speedups(rows)}


def cases(settings: Settings) -> list[SpeedCase]:
    """The tasks that benchmark.tasks names, at benchmark.seqlens' longest length where that is shorter."""
    asked, found = settings.benchmark, []
    for name in asked.tasks or _USUAL:
        recipe, shape = _TASKS[name]
        stage = stages_of(settings_of_recipe(recipe))[-1]
        if asked.longest is not None and shape.length > asked.longest:
            side = None if shape.side is None else int(asked.longest**0.5)
            length = asked.longest if side is None else side * side
            shape = SequenceShape(shape.classes, length, shape.vocab_size, side, shape.towers)
        found.append(SpeedCase(name, classifier_config(stage.settings.classifier, shape), stage.batch))
    return found
