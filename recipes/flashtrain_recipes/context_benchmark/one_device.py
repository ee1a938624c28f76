"""The same attention on one device, by our kernels: measured, or computed from the rate at a shorter length."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from flashtrain_recipes.attention_benchmark.clock import Clock, Pace
from flashtrain_recipes.attention_benchmark.inputs import Context, Inputs
from flashtrain_recipes.attention_benchmark.peers.ours import Flashtrain
from flashtrain_recipes.attention_benchmark.reference import Expected
from flashtrain_recipes.context_benchmark.case import ContextCase
from flashtrain_recipes.context_benchmark.contenders import gradients
from flashtrain_recipes.context_benchmark.errors import Errors, errors_of_one

MEASURED = "measured"


@dataclass
class Rates:
    """What one device has reached so far: for each family of cases {length: (FLOPs, forward ms, backward ms)}."""

    found: dict[tuple[Any, ...], dict[int, tuple[float, float, float]]] = field(default_factory=dict)

    def add(self, case: ContextCase, forward: float, backward: float) -> None:
        self.found.setdefault(case.family, {})[case.attention.seqlen_q] = (case.flops, forward, backward)

    def extrapolated(self, case: ContextCase) -> tuple[float, float, int] | None:
        """(forward ms, backward ms, the length they follow from): as many FLOP/s as at the longest length measured."""
        known = self.found.get(case.family)
        if not known:
            return None
        length = max(known)
        flops, forward, backward = known[length]
        return forward * case.flops / flops, backward * case.flops / flops, length


class OneDevice:
    """One case on one rank's device."""

    def __init__(self, case: ContextCase, inputs: Inputs, device: torch.device, clock: Clock) -> None:
        self.case, self.inputs, self.clock = case, inputs, clock
        self.attend = Flashtrain().attend(case.attention, Context(case.attention, device))
        self.leaves = [inputs.q, inputs.k, inputs.v]
        self.errors: Errors | None = None
        self.peak_gib: float | None = None
        self._forward: list[float] = []
        self._backward: list[float] = []
        self._host = (0.0, 0.0)

    def begin(self, expected: Expected | None) -> None:
        """A first call of each pass: what they give, how much memory they need, and how long launching takes."""
        kept: list[Any] = []

        def both() -> None:
            began = time.perf_counter()
            out = self.attend(self.inputs)
            between = time.perf_counter()
            kept.append((out.detach(), gradients(out, self.leaves, self.inputs.dout)))
            self._host = (between - began, time.perf_counter() - between)

        both()
        kept.clear()
        peak = self.clock.peak_mib(both)
        self.peak_gib = None if peak is None else peak / 1024
        if expected is not None:
            self.errors = errors_of_one(expected, *kept[-1])

    def turn(self) -> None:
        """One sample of each pass."""
        kept: list[Any] = []
        forward, backward = self._host
        took = self.clock.sample([lambda: kept.append(self.attend(self.inputs))], Pace(1, forward))
        self._forward.append(took)
        one = [lambda: gradients(kept[0], self.leaves, self.inputs.dout)]
        self._backward.append(self.clock.sample(one, Pace(1, backward)))

    def milliseconds(self) -> tuple[float, float]:
        """(forward, backward), the medians."""
        return statistics.median(self._forward), statistics.median(self._backward)
