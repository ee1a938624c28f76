"""Measure forward and backward of one attention on a rank, while the other ranks do the same.

B batch (1), S sequence, n tokens a rank holds, H query heads, D head dimension; g query heads of
the last key/value head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flashtrain.distributed.context import local_attention
from flashtrain_recipes.attention_benchmark.reference import Expected
from flashtrain_recipes.harness.clock import Clock, Pace, Timed
from flashtrain_recipes.harness.rows import Row
from flashtrain_recipes.harness.turns import Sample


class Passes:
    """Measures forward and backward of one attention on this rank: the method `first` measures
    errors and memory, `sample` the times.

    Args:
        call: computes the output from the leaves.
        leaves: q, k and v, which require gradients.
        dout: the output's gradient.
        gather: returns a value of all ranks, given this rank's; it collects the launching times,
            of which the longest is used.

    Attributes:
        measures: peak memory in GiB and errors, by their columns.
    """

    def __init__(
        self,
        call: Callable[..., Tensor],
        leaves: Sequence[Tensor],
        dout: Tensor,
        clock: Clock,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
    ) -> None:
        self.call = call
        self.leaves = leaves
        self.dout = dout
        self.clock = clock
        self.gather = gather
        self.measures: Row = {"peak_memory_gib": None, "error": None, "gradient_error": None}
        self._host = [0.0, 0.0]  # seconds of launching

    def first(self, expected: Expected | None, shard: Callable[[Tensor], Tensor]) -> None:
        """Run forward and backward twice before anything is timed: once to compare the results
        with `expected`, once for peak memory and the time that the host takes to launch them.

        Args:
            expected: the float64 results of the whole sequence; None: errors are not computed.
            shard: cuts a tensor of the whole sequence (S, ...) to this rank's tokens (n, ...).
        """
        out = self.call(*self.leaves)
        gradients = self._gradients(out)
        if expected is not None:
            self.measures["error"] = expected.error(out.detach(), shard)
            self.measures["gradient_error"] = expected.gradient_error(*gradients, shard=shard)
        del out, gradients
        peak = self.clock.peak_mib(self._launch)
        self.measures["peak_memory_gib"] = None if peak is None else peak / 1024

    def sample(self) -> Sample:
        """Time forward and backward once each, and return the milliseconds."""
        forward, backward = self._timed()
        return {"forward_ms": forward.milliseconds, "backward_ms": backward.milliseconds}

    def _gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, list(self.leaves), self.dout)

    def _launch(self) -> None:
        self._host = [max(self.gather(one.host_us)) / 1e6 for one in self._timed()]

    def _timed(self) -> tuple[Timed, Timed]:
        outs: list[Tensor] = []
        forward = self.clock.queued(
            [lambda: outs.append(self.call(*self.leaves))], Pace(1, self._host[0])
        )
        return forward, self.clock.queued(
            [lambda: self._gradients(outs[0])], Pace(1, self._host[1])
        )


@contextmanager
def only_communicating() -> Iterator[None]:
    """Replace the kernels inside a `with` block by functions that return zeros, so that only
    communication is timed."""
    before = local_attention.attention_forward, local_attention.attention_backward
    local_attention.attention_forward, local_attention.attention_backward = _forward, _backward
    try:
        yield
    finally:
        local_attention.attention_forward, local_attention.attention_backward = before


def _forward(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_zeros(
        (q.shape[0], q.shape[2], q.shape[1]), dtype=local_attention.summing_dtype(q.dtype)
    )
    return q.new_zeros(q.shape), lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
