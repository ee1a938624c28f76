"""The lines of mode=plan that all tasks share: memory, whether it fits, and time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from flashtrain.errors import UserError
from flashtrain.settings.settings import Settings
from flashtrain.spec import Plan, task_of
from flashtrain.tasks.batching import Batching, room
from flashtrain.training.hardware import Hardware, duration, expected_rate
from flashtrain.training.memory import FREE_SHARE, GIB
from flashtrain.training.memory_choice import AUTO

MEASURED_ON = ("H100", "H200")
DEVICES = (2, 4, 8, 16, 32, 64)
FITS = "It would fit with any of these:"
QUICK = 1e12  # FLOPs of a step that takes no CPU a minute: its rate need not be measured
SHARDING = ("fsdp", "context_parallel")


def memory_plan(
    settings: Settings,
    hardware: Hardware,
    batching: Batching,
    again: Callable[[Settings], Batching],
) -> list[str]:
    """Return mode=plan's lines on memory: the estimate by use (weights, gradients, ...), and every
    option of memory savings with ">" before the chosen one. Of a training that does not fit also
    what it needs, and with which changes it would fit.

    Args:
        again: returns the batching of changed settings.
    """
    needed = batching.estimate
    if needed is None:
        return []
    further = {"of it exchanged": needed.exchange, "in host memory": needed.host}
    sizes = {**needed.parts(), **{name: size for name, size in further.items() if size}}
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in sizes.items())
    options = [
        f"{'>' if option.savings == batching.savings else ' '} {option.line()}"
        for option in batching.options
    ]
    lines = [
        f"memory: {needed.total / GIB:.2f} GiB at the step's peak, then in use: {parts}",
        *(options if len(options) > 1 else []),
    ]
    if batching.fits:
        return lines
    free = room(settings, hardware)
    both = not free.holds_host(needed)
    usable = [
        f"{FREE_SHARE * size / GIB:.1f}"
        for size in (free.device, free.host if both else None)
        if size
    ]
    needs = (
        f"{needed.total / GIB:.1f} "
        f"GiB{f' and {needed.host / GIB:.1f} GiB of host memory' if both else ''}"
    )
    line = (
        "does not fit: "
        f"needs {needs}, {' and '.join(usable)} GiB may be used ({FREE_SHARE:.0%} of what is free)"
    )
    found = [
        one
        for kind in _changes(settings, hardware)
        if (one := _first_fitting(settings, kind, again))
    ]
    nothing = "No single change of optimizer states, adapter, devices or context makes it fit."
    return [*lines, f"{line}. {FITS if found else nothing}", *found]


def _first_fitting(
    settings: Settings, changes: Sequence[dict[str, Any]], again: Callable[[Settings], Batching]
) -> str | None:
    """Return a line with the first of the changes (settings by name) with which the training fits
    and the memory that it then needs; None if it fits with none of them."""
    for change in changes:
        changed = deepcopy(settings)
        for name, value in change.items():
            group, _, key = name.rpartition(".")
            setattr(getattr(changed, group) if group else changed, key, value)
        try:
            changed.check()
            task_of(changed).check(changed)
            tokens = changed.trainer.tokens_per_step
            step = getattr(changed, "context", 1) * changed.data_ranks
            if tokens % step:
                change["trainer.tokens_per_step"] = changed.trainer.tokens_per_step = (
                    -(-tokens // step) * step
                )
            task_of(changed).check_step(changed, ())
            batching = again(changed)
        except UserError:  # this task or model has no such setting
            continue
        if batching.fits and batching.estimate is not None:
            words = " ".join(
                f"{name}={'null' if value is None else value}" for name, value in change.items()
            )
            savings = batching.savings.describe()
            return (
                f"  {words}: "
                f"{batching.estimate.total / GIB:.1f} GiB{', with ' if savings else ''}{savings}"
            )
    return None


def _changes(settings: Settings, hardware: Hardware) -> list[list[dict[str, Any]]]:
    """Return lists of changes (settings by name) that need less memory on a device: one list for
    each kind of change, from small to large."""
    context, fewest = getattr(settings, "context", 1), settings.trainer.devices
    counts = [count for count in DEVICES if count >= fewest and hardware.kind == "cuda"]
    return [
        [{"memory.activation_checkpointing": AUTO, "trainer.micro_batch": None}],
        [{"masked.token_budget": None}] if hasattr(settings, "masked") else [],
        [{"optimizer.states": "8bit"}],
        _with_adapter(settings, context, fewest) if hasattr(settings, "model") else [],
        *(
            [{"trainer.devices": count, "trainer.strategy": name} for count in counts]
            for name in SHARDING
        ),
        [{"context": context >> halved} for halved in range(1, context.bit_length() - 7)],
    ]


def _with_adapter(settings: Settings, context: int, devices: int) -> list[dict[str, Any]]:
    """Return LoRA alone, on sharded weights, on 4 bits, and these with ever shorter contexts."""
    lora = {} if settings.model.adapter else {"model.adapter": "lora"}
    halvings = range(context.bit_length() - 7)
    if settings.model.quantize is not None:
        return []
    four = {**lora, "model.quantize": "nf4"}
    kinds = [{**lora, "trainer.strategy": name} for name in SHARDING if devices > 1]
    return [lora, *kinds, *({**four, **({"context": context >> n} if n else {})} for n in halvings)]


def plan_text(
    lines: Sequence[str],
    settings: Settings,
    hardware: Hardware,
    flops: float,
    *,
    at_most: bool = False,
    how: str = "",
    faster: float = 1.0,
) -> Plan:
    """Return the plan of a training: the lines about the training, and its estimated time.

    Args:
        lines: lines about the training.
        flops: FLOPs of the whole training, on all devices together, or an upper bound if `at_most`;
            nan if unknown, and then no time is estimated.
        how: how the FLOPs are counted, in words.
        faster: how many times as fast as bf16 the step is expected to be.
    """
    if math.isnan(flops):
        return Plan("\n".join([*lines, *last_lines(settings, hardware)]), 0)
    rate, source = expected_rate(hardware)
    seconds, steps = flops / (rate * settings.trainer.ranks * faster), settings.trainer.steps
    time = (
        f"{'at most ' if at_most else ''}about {duration(seconds)}, {seconds / steps:.2g} s a step,"
    )
    last = f"time: {time} for {flops:.3g} FLOPs{how} ({source}), without start-up and validation"
    return Plan("\n".join([*lines, last, *last_lines(settings, hardware)]), seconds)


def slow_steps(settings: Settings, hardware: Hardware, flops: float) -> list[str]:
    """Return a list with the line on time for a training whose steps, of `flops` FLOPs each, take
    a CPU a minute or more; [] for others."""
    if hardware.kind != "cpu" or not flops > QUICK:
        return []
    rate, source = expected_rate(hardware)
    seconds = flops / (rate * settings.trainer.ranks)
    total = duration(seconds * settings.trainer.steps)
    return [f"time: about {total}, {duration(seconds)} a step ({source})"] * (seconds >= 60)


def last_lines(settings: Settings, hardware: Hardware) -> list[str]:
    """Return the last lines of mode=plan: whether flashtrain has run on such a GPU, and
    how the training starts."""
    ran = hardware.kind == "cpu" or any(name in hardware.name for name in MEASURED_ON)
    start = "leave out mode=plan to train"
    if settings.hardware.plan_for is not None:
        start = "to train on such a machine, leave out mode=plan and hardware.plan_for"
    computed = [] if ran else [f"computed; flashtrain has run on {' and '.join(MEASURED_ON)} only."]
    return [*computed, f"nothing was started; {start}."]
