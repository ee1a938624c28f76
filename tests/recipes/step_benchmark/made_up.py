"""Baselines and a clock made up for the tests: they take turns, run out of memory,
and are slow on command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from flashtrain_recipes.harness.clock import Clock
from flashtrain_recipes.harness.turns import Effort
from flashtrain_recipes.step_benchmark.cases import GPT2Case
from flashtrain_recipes.step_benchmark.training_step import StepBaseline, TrainingStep
from flashtrain_recipes.step_benchmark.turns import StepTurns

CPU = torch.device("cpu")
CASE = GPT2Case("demo", 8, 2, "fp32", vocab_size=64)


class MadeUp(StepBaseline):
    """A model of one number. calls: the titles of all steps in order. does: called at each step."""

    compiled = True

    def __init__(
        self, name: str, calls: list[str] | None = None, does: Callable[[], object] = lambda: None
    ) -> None:
        self.name = self.title = name
        self.calls, self.does = calls if calls is not None else [], does

    def build(self, case: GPT2Case, device: torch.device) -> TrainingStep:
        model = torch.nn.Linear(1, 1, bias=False)

        def loss(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            self.calls.append(self.title)
            self.does()
            return model(torch.ones(1)).sum() ** 2

        return TrainingStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.01), lambda: None)


class MemoryClock(Clock):
    """A clock that sees memory: 100 MiB more are held at each look, and a step
    needs 1024 MiB beyond that."""

    held = 0.0

    def allocated_mib(self) -> float:
        self.held += 100
        return self.held

    def peak_mib(self, call) -> float:
        call()
        return 1024.0


def turns(
    notes: list | None = None, clock: Clock | None = None, batch: int = 2, **options
) -> StepTurns:
    def note(title: str, reason: str) -> None:
        if notes is not None:
            notes.append((title, reason))

    own = {"effort": Effort(rounds=3, steps=2), "peak_flops": None, "full": [], **options}
    return StepTurns(
        replace(CASE, batch=batch), device=CPU, clock=clock or Clock(), seed=0, note=note, **own
    )


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
