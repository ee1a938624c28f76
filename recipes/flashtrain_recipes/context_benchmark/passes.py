"""Forward and backward of one attention, as a rank computes them with its team: first calls, then samples.

B batch (1), S sequence, n tokens a rank holds, H query heads, D head dimension; g query heads of the last key/value
head.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flashtrain.distributed.context import local_attention
from flashtrain_recipes.attention_benchmark.reference import Expected
from flashtrain_recipes.context_benchmark.ranks import Alone, host_seconds, milliseconds
from flashtrain_recipes.harness.clock import Clock
from flashtrain_recipes.harness.rows import Row


class Passes:
    """call: of the leaves q, k and v. expected: the whole sequence's; held: cuts a tensor (S, ...) to (n, ...)."""

    def __init__(self, call: Callable[..., Tensor], leaves: Sequence[Tensor], dout: Tensor, team: Alone) -> None:
        self.call, self.leaves, self.dout, self.team = call, leaves, dout, team
        self.errors: tuple[float | None, float | None] = (None, None)
        self.peak_gib: float | None = None
        self._host = (0.0, 0.0)
        self._samples: list[tuple[float, float]] = []
        self._communication: list[float] = []

    def first(self, clock: Clock, expected: Expected | None, held: Callable[[Tensor], Tensor]) -> None:
        """A first call of each pass: what they give; a second: the memory, and how long launching takes."""
        out = self.call(*self.leaves)
        gradients = self._gradients(out)
        if expected is not None:
            self.errors = errors(expected, held, out.detach(), *gradients)
        del out, gradients
        peak = clock.peak_mib(self._launch)
        self.peak_gib = None if peak is None else peak / 1024

    def turn(self, *, communication: bool = False) -> float:
        """One sample of each pass; both together in milliseconds. communication: one without the computing, too."""
        self._samples.append(self._sample())
        if communication:
            with only_communicating():
                self._communication.append(sum(self._sample()))
        return sum(self._samples[-1])

    def found(self) -> Row:
        """What this rank found: medians in milliseconds; communication_ms: of both passes together."""
        forward, backward = (statistics.median(part) for part in zip(*self._samples, strict=True))
        alone = statistics.median(self._communication) if self._communication else None
        error, gradient_error = self.errors
        return {
            "forward_ms": forward, "backward_ms": backward, "communication_ms": alone, "rounds": len(self._samples),
            "peak_memory_gib": self.peak_gib, "error": error, "gradient_error": gradient_error,
        }  # fmt: skip

    def _gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, list(self.leaves), self.dout)

    def _launch(self) -> None:
        outs: list[Tensor] = []
        forward = host_seconds(self.team, lambda: outs.append(self.call(*self.leaves)))
        self._host = forward, host_seconds(self.team, lambda: self._gradients(outs[0]))

    def _sample(self) -> tuple[float, float]:
        outs: list[Tensor] = []
        forward = milliseconds(self.team, lambda: outs.append(self.call(*self.leaves)), self._host[0])
        return forward, milliseconds(self.team, lambda: self._gradients(outs[0]), self._host[1])


def errors(
    expected: Expected, held: Callable[[Tensor], Tensor], out: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> tuple[float, float]:
    """(of out, of the gradients), of what a rank holds: out (1, n, H, D), dq, dk, dv: the largest difference from the
    reference over the whole reference's largest value. The largest of all ranks' is the whole's."""

    def error(found: Tensor, whole: Tensor) -> float:
        return float((found.double() - held(whole)).abs().max()) / (float(whole.abs().max()) or 1.0)

    group = expected.out.shape[1]
    of_gradients = [error(dq[-1, :, -group:], expected.dq)]
    of_gradients += [error(x[-1, :, -1], whole) for x, whole in ((dk, expected.dk), (dv, expected.dv))]
    return error(out[-1, :, -group:], expected.out), max(of_gradients)


@contextmanager
def only_communicating() -> Iterator[None]:
    """Within it, the kernels' two passes of every way return zeros of the right shapes at once.

    All that the ways do besides calling them stays as it is. The results are meaningless.
    """
    before = local_attention.forward, local_attention.backward
    local_attention.forward, local_attention.backward = _forward, _backward
    try:
        yield
    finally:
        local_attention.forward, local_attention.backward = before


def _forward(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=local_attention.summing_dtype(q.dtype))
    return q.new_zeros(q.shape), lse


def _backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
