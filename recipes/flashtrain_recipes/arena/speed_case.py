"""One task whose training steps are measured: its model, its length, random rows of that length.

B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtrain.models.classifier import Classifier
from flashtrain.models.classifier_config import ClassifierConfig
from flashtrain.training.gradients import clip_gradients
from flashtrain.training.optimizers import adamw
from flashtrain_recipes.step_benchmark.contenders import Contender
from flashtrain_recipes.step_benchmark.training_step import TrainingStep

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
