"""What a run must be for devices to share each sequence (trainer.strategy=context), by its settings alone.

What the model's heads allow is checked in context_run.py, which may import more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashtrain.errors import UserError

if TYPE_CHECKING:
    from flashtrain.settings.settings import Settings

CONTEXT = "context"


def strategy_of(settings: Settings) -> str:
    """trainer.strategy, or "context" where that is auto and context_parallel is above 1."""
    strategy = settings.trainer.strategy
    return CONTEXT if strategy == "auto" and (settings.context_parallel or 1) > 1 else strategy


def check_context(settings: Settings) -> None:
    """Raise UserError where a training asks for context parallelism and cannot have it."""
    degree, named = settings.context_parallel, settings.trainer.strategy
    if settings.strategy != CONTEXT:
        if degree is not None and degree > 1:
            raise UserError(
                f"context_parallel={degree} shares a sequence among devices, and trainer.strategy={named} gives each "
                "its own: choose trainer.strategy=context, or context_parallel=1."
            )
        way, layout = settings.trainer.context_way, settings.trainer.context_layout
        if degree is None and (way != "auto" or layout != "balanced"):
            given = f"context_way={way}" if way != "auto" else f"context_layout={layout}"
            raise UserError(
                f"trainer.{given} says how devices share a sequence, and each has its own: add context_parallel=2 (or "
                "more), or leave it out."
            )
        return
    _check_degree(settings)
    if settings.attention.name != "flash":
        raise UserError(
            f"attention={settings.attention.name} computes whole sequences on one device, and "
            f"{asked_to_share(settings)} computes flash attention over all: choose attention=flash."
        )
    if settings.trainer.cuda_graphs:
        raise UserError(
            f"trainer.cuda_graphs=true cannot record what devices send each other under {asked_to_share(settings)}: "
            "choose trainer.cuda_graphs=false."
        )


def _check_degree(settings: Settings) -> None:
    degree, ranks = settings.context_degree, settings.trainer.ranks
    if ranks % degree == 0:
        return
    fitting = ", ".join(str(number) for number in range(1, ranks + 1) if ranks % number == 0)
    devices = f"{ranks} device{'' if ranks == 1 else 's'} (trainer.devices x trainer.nodes)"
    raise UserError(
        f"context_parallel={degree} does not divide {devices}: choose context_parallel={fitting}, or "
        f"trainer.devices={degree}."
    )


def asked_to_share(settings: Settings) -> str:
    """How context parallelism was asked for."""
    if settings.trainer.strategy == CONTEXT:
        return f"trainer.strategy={CONTEXT}"
    return f"context_parallel={settings.context_parallel}"
