"""Contenders and a clock made up for the tests: they take turns, run out of memory, and are slow on command."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashtrain_recipes.benchmark_runner.measuring import CpuClock
from flashtrain_recipes.step_benchmark.training_step import Contender, StepCase, TrainingStep

CPU = torch.device("cpu")
CASE = StepCase("demo", 8, "fp32", vocab_size=64)
NO_MEMORY = "CUDA out of memory. Tried to allocate 20.00 GiB"


class MadeUp(Contender):
    """A model of one number. calls: the titles of all steps in order. does: called with the batch at each step."""

    compiled = True

    def __init__(
        self, name: str, calls: list[str] | None = None, does: Callable[[int], object] = lambda batch: None
    ) -> None:
        self.name = self.title = name
        self.calls, self.does = calls if calls is not None else [], does
        self.moves: list[str] = []

    def build(self, case: StepCase, batch: int, device: torch.device) -> TrainingStep:
        model = torch.nn.Linear(1, 1, bias=False)

        def loss(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            self.calls.append(self.title)
            self.does(len(tokens))
            return model(torch.ones(1)).sum() ** 2

        step = TrainingStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.01), lambda: None)
        move = step.move
        step.move = lambda to: (self.moves.append(to.type), move(to))  # type: ignore[method-assign]
        return step


class MemoryClock(CpuClock):
    """A clock that sees memory: 100 MiB more are held at each look, and a step needs 1024 MiB beyond that."""

    def __init__(self) -> None:
        self.held = 0.0

    def held_mib(self) -> float:
        self.held += 100
        return self.held

    def peak_mib(self, call) -> float:
        call()
        return 1024.0


def runs_out(at: int) -> Callable[[int], None]:
    """Raises what torch raises without memory, for batches of `at` and more."""

    def does(batch: int) -> None:
        if batch >= at:
            raise torch.OutOfMemoryError(NO_MEMORY)

    return does
