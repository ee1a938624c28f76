"""Learning-rate schedules with a linear warm-up.

They are torch's LambdaLR, for Lightning's interval "step"; the optimizer's
learning rate is the peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


# transformers' schedules begin with a step at rate 0, and its linear one has no minimum.
def cosine_with_warmup(
    optimizer: Optimizer, warmup_steps: int, total_steps: int, minimum_ratio: float = 0.1
) -> LambdaLR:
    """Make a schedule: linear warm-up to the peak, then half a cosine down to
    minimum_ratio times the peak.

    The first step already has 1/warmup_steps of the peak, and the last of total_steps the minimum
    (Loshchilov and Hutter 2017, arXiv 1608.03983, without restarts); a minimum of 0 is reached one
    step later, so that every step still learns. Steps past total_steps stay at the minimum.

    Args:
        optimizer: its learning rate is the peak.
        warmup_steps, total_steps: optimizer steps of the warm-up, and of the whole training.
        minimum_ratio: the last learning rate divided by the peak.
    """

    def ratio(step: int) -> float:
        done = _fraction_done(step, warmup_steps, total_steps, minimum_ratio)
        return minimum_ratio + (1 - minimum_ratio) * 0.5 * (1 + math.cos(math.pi * done))

    return _after_warmup(optimizer, warmup_steps, ratio)


def linear_with_warmup(
    optimizer: Optimizer, warmup_steps: int, total_steps: int, minimum_ratio: float = 0.0
) -> LambdaLR:
    """Make a schedule: linear warm-up to the peak, then a straight line down to
    minimum_ratio times the peak.

    The first and last steps, and the arguments, are as in `cosine_with_warmup`.
    """

    def ratio(step: int) -> float:
        return 1 - (1 - minimum_ratio) * _fraction_done(
            step, warmup_steps, total_steps, minimum_ratio
        )

    return _after_warmup(optimizer, warmup_steps, ratio)


def constant_with_warmup(
    optimizer: Optimizer,
    warmup_steps: int,
    total_steps: int | None = None,
    minimum_ratio: float = 1.0,
) -> LambdaLR:
    """Make a schedule: linear warm-up to the peak over warmup_steps, then the peak for ever.

    total_steps and minimum_ratio have no effect: all schedules are called with the same arguments.
    """
    return _after_warmup(optimizer, warmup_steps, lambda step: 1.0)


SCHEDULES: dict[str, Callable[..., LambdaLR]] = {
    "cosine": cosine_with_warmup,
    "linear": linear_with_warmup,
    "constant": constant_with_warmup,
}


def _fraction_done(step: int, warmup_steps: int, total_steps: int, minimum_ratio: float) -> float:
    """Return how much of the descent is done: 0 at the step that reaches the peak, 1 from the last
    step on, or from the step after the last if minimum_ratio is 0."""
    first = max(warmup_steps - 1, 0)
    last = total_steps - 1 if minimum_ratio else total_steps
    return min(1.0, (step - first) / max(1, last - first))


def _after_warmup(
    optimizer: Optimizer, warmup_steps: int, ratio: Callable[[int], float]
) -> LambdaLR:
    def factor(step: int) -> float:
        return (step + 1) / warmup_steps if step < warmup_steps else ratio(step)

    return LambdaLR(optimizer, factor)
