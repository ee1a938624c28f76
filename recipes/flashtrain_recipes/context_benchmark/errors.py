"""How far results over several devices, and those of one, are from float64.

S sequence, n tokens a rank holds, H query heads, D head dimension; g query heads of the last key/value head.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flashtrain.distributed.context.layout import Layout
from flashtrain_recipes.attention_benchmark.reference import Expected


class Errors(NamedTuple):
    """The largest difference from the reference over the reference's largest value: of out, and of dQ, dK and dV."""

    out: float
    gradients: float

    @classmethod
    def largest(cls, found: list[Errors]) -> Errors:
        return cls(max(one.out for one in found), max(one.gradients for one in found))

    def over(self, other: Errors) -> float | None:
        """How many times larger than another's, the larger of the two; None where the other has none."""
        if not (other.out and other.gradients):
            return None
        return max(self.out / other.out, self.gradients / other.gradients)


def errors_of_rank(expected: Expected, layout: Layout, rank: int, out: Tensor, gradients: tuple[Tensor, ...]) -> Errors:
    """Of what a rank holds: out (1, n, H, D) and dq, dk, dv. The largest of all ranks' is the whole's."""
    dq, dk, dv = gradients
    group = expected.out.shape[1]
    of_gradients = (
        _error(layout, rank, dq[-1, :, -group:], expected.dq),
        _error(layout, rank, dk[-1, :, -1], expected.dk),
        _error(layout, rank, dv[-1, :, -1], expected.dv),
    )
    return Errors(_error(layout, rank, out[-1, :, -group:], expected.out), max(of_gradients))


def errors_of_one(expected: Expected, out: Tensor, gradients: tuple[Tensor, ...]) -> Errors:
    """Of the whole on one device."""
    dq, dk, dv = gradients
    return Errors(expected.error(out), expected.gradient_error(dq, dk, dv))


def _error(layout: Layout, rank: int, found: Tensor, whole: Tensor) -> float:
    largest = float(whole.abs().max()) or 1.0
    mine = layout.shard(whole[None], rank)[0]
    return float((found.double() - mine).abs().max()) / largest
