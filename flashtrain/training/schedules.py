"""Learning-rate schedules, by optimiser step: warm-up, then cosine, linear or constant.

Each returns a torch LambdaLR; in Lightning give it with interval "step". The optimiser's own learning rate is the peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from flashtrain.errors import UserError, unknown


def cosine_with_warmup(
    optimizer: Optimizer, warmup_steps: int, total_steps: int, minimum_ratio: float = 0.1
) -> LambdaLR:
    """Linear warm-up to the peak over warmup_steps, then half a cosine down to minimum_ratio times the peak.

    The first step already has 1/warmup_steps of the peak, and the last of total_steps the minimum (Loshchilov and
    Hutter 2017, arXiv 1608.03983, without restarts). Steps past total_steps stay at the minimum.
    Raises UserError for counts that do not fit together or a ratio outside 0..1.
    """
    _check(warmup_steps, total_steps, minimum_ratio)

    def ratio(step: int) -> float:
        done = _fraction_done(step, warmup_steps, total_steps)
        return minimum_ratio + (1 - minimum_ratio) * 0.5 * (1 + math.cos(math.pi * done))

    return _after_warmup(optimizer, warmup_steps, ratio)


def linear_with_warmup(
    optimizer: Optimizer, warmup_steps: int, total_steps: int, minimum_ratio: float = 0.0
) -> LambdaLR:
    """Linear warm-up to the peak over warmup_steps, then a straight line down to minimum_ratio times the peak.

    Raises UserError for counts that do not fit together or a ratio outside 0..1.
    """
    _check(warmup_steps, total_steps, minimum_ratio)

    def ratio(step: int) -> float:
        return 1 - (1 - minimum_ratio) * _fraction_done(step, warmup_steps, total_steps)

    return _after_warmup(optimizer, warmup_steps, ratio)


def constant_with_warmup(
    optimizer: Optimizer, warmup_steps: int, total_steps: int | None = None, minimum_ratio: float = 1.0
) -> LambdaLR:
    """Linear warm-up to the peak over warmup_steps, then the peak for ever.

    total_steps and minimum_ratio are taken so that all schedules are called alike; they change nothing.
    Raises UserError for a negative warmup_steps.
    """
    if warmup_steps < 0:
        raise UserError(f"warmup_steps must be 0 or more, got {warmup_steps}")
    return _after_warmup(optimizer, warmup_steps, lambda step: 1.0)


SCHEDULES: dict[str, Callable[..., LambdaLR]] = {
    "cosine": cosine_with_warmup,
    "linear": linear_with_warmup,
    "constant": constant_with_warmup,
}


def make_schedule(
    name: str, optimizer: Optimizer, warmup_steps: int, total_steps: int, minimum_ratio: float
) -> LambdaLR:
    """The schedule of that name: "cosine", "linear" or "constant". Raises UserError for another."""
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    return SCHEDULES[name](optimizer, warmup_steps, total_steps, minimum_ratio)


def _check(warmup_steps: int, total_steps: int, minimum_ratio: float) -> None:
    if total_steps < 1:
        raise UserError(f"total_steps must be 1 or more, got {total_steps}")
    if warmup_steps < 0:
        raise UserError(f"warmup_steps must be 0 or more, got {warmup_steps}")
    if warmup_steps > total_steps:
        raise UserError(f"warmup_steps={warmup_steps} must not exceed the {total_steps} steps of the whole run")
    if not 0 <= minimum_ratio <= 1:
        raise UserError(f"minimum_ratio must lie between 0 and 1, got {minimum_ratio}")


def _fraction_done(step: int, warmup_steps: int, total_steps: int) -> float:
    """0 at the step that reaches the peak, 1 at the last step and after."""
    first = max(warmup_steps - 1, 0)
    return min(1.0, (step - first) / max(1, total_steps - 1 - first))


def _after_warmup(optimizer: Optimizer, warmup_steps: int, ratio: Callable[[int], float]) -> LambdaLR:
    def factor(step: int) -> float:
        return (step + 1) / warmup_steps if step < warmup_steps else ratio(step)

    return LambdaLR(optimizer, factor)
