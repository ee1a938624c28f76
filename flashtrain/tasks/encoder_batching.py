"""How a device's part of a step of BERT or of a classifier is cut into micro-batches, and with which memory savings.

On a GPU by the estimate of training.memory, as batching.py does for language models; elsewhere as the settings
say, or all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashtrain.errors import UserError
from flashtrain.models.memory_savings import MemorySavings
from flashtrain.settings.settings import Settings
from flashtrain.tasks.batching import Batching, room
from flashtrain.training.hardware import Hardware
from flashtrain.training.memory import FREE_SHARE, GIB
from flashtrain.training.memory_choice import (
    AUTO,
    Estimate,
    MemoryOption,
    Room,
    candidates,
    choose_option,
    option_words,
)


def choose_encoder_batching(
    settings: Settings, hardware: Hardware, sizes: Sequence[int], share: int, estimate: Estimate
) -> Batching:
    """The largest of `sizes` whose estimated memory fits what is free, with the cheapest savings that it takes.

    sizes: what a micro-batch may be, ascending, in samples or tokens; a single one where the settings name it. share:
    of a step, on a device, in the same unit. estimate: of a size and savings.
    Without a GPU the largest of them, and no savings but those asked for.
    UserError: not even the smallest fits, and the settings name none.
    """
    gpu = hardware.kind == "cuda"
    free = room(settings, hardware) if gpu else Room(None)
    options = [_option(savings, sizes, free, estimate) for savings in _savings(settings, auto=gpu)]
    chosen = choose_option(options, free)
    if not chosen.fits and len(sizes) > 1:
        raise UserError(
            f"the smallest micro-batch, {sizes[0]:,}, needs an estimated {chosen.estimate.total / GIB:.1f} GiB, and "
            f"{FREE_SHARE * (free.device or 0) / GIB:.1f} GiB ({FREE_SHARE:.0%} of what is free) may be used: choose "
            "memory=full, a smaller model, shorter samples or attention=flash."
        )
    smaller = [size for size in sizes if size < chosen.micro_batch][-1:]
    less = [_option(chosen.savings, smaller, free, estimate)] if smaller else []
    every = [savings for savings in candidates(AUTO) if not savings.offload]
    less += [_option(savings, [chosen.micro_batch], free, estimate) for savings in every]
    tried = [option.savings for option in options]
    options += [_option(savings, sizes, free, estimate) for savings in every if savings not in tried]
    return Batching(
        chosen.micro_batch,
        share // chosen.micro_batch,
        chosen.estimate,
        chosen.savings,
        chosen.fits,
        options=options,
        alternatives=[option for option in less if option.estimate.total < chosen.estimate.total],
    )


def memory_words(batching: Batching) -> str:
    """What the line that announces a training says of memory: the savings, and the estimate."""
    savings = batching.savings.describe()
    if batching.estimate is None:
        return f", {savings}" if savings else ""
    doubt = "" if batching.fits else f", more than {FREE_SHARE:.0%} of what is free"
    return f"{', ' if savings else ''}{savings} (estimated {batching.estimate.total / GIB:.1f} GiB{doubt})"


def memory_columns(batching: Batching) -> dict[str, Any]:
    """What a summary row says of memory, as a language model's does."""
    needed = batching.estimate
    return {
        "memory": batching.savings.describe() or "none",
        "memory_estimate_gib": None if needed is None else round(needed.total / GIB, 2),
    }


def memory_plan(batching: Batching) -> list[str]:
    """The estimate in one line by what it holds, and every way to run, the one taken marked; for mode=plan."""
    if batching.estimate is None:
        return []
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in batching.estimate.parts().items())
    ways = [f"{'>' if option.savings == batching.savings else ' '} {option.line()}" for option in batching.options]
    return [f"memory: {batching.estimate.total / GIB:.2f} GiB ({parts})", *(ways if len(ways) > 1 else [])]


def memory_advice(batching: Batching, otherwise: str) -> str:
    """What to change after running out of memory: the ways to run that are estimated to need less, then `otherwise`."""
    ways = [
        f"{option_words(option.savings)} (estimated {option.estimate.total / GIB:.1f} GiB at {option.micro_batch:,})"
        for option in batching.alternatives
        if option.micro_batch == batching.micro_batch
    ]
    return " or ".join([*ways[:2], otherwise])


def _savings(settings: Settings, *, auto: bool) -> list[MemorySavings]:
    """The savings to try, cheapest first; one where memory.checkpointing names a kind, or nothing is to be chosen."""
    asked = settings.memory
    kind = asked.checkpointing if auto or asked.checkpointing != AUTO else "none"
    offload = asked.offload and kind in ("full", AUTO)
    tried = candidates(kind, offload=offload, ffn_chunk=asked.ffn_chunk, loss_chunk=asked.loss_chunk)
    return [savings for savings in tried if savings.offload == offload]


def _option(savings: MemorySavings, sizes: Sequence[int], room: Room, estimate: Estimate) -> MemoryOption:
    """The largest size that fits with these savings, or the smallest where none does."""
    for size in reversed(sizes):
        needed = estimate(size, savings)
        if room.holds(needed):
            return MemoryOption(savings, size, needed, True)
    return MemoryOption(savings, sizes[0], needed, False)
