"""Which memory savings a run takes: the cheapest in time whose estimate fits, in a fixed order that a user can print.

The order is none, selective, full (each a little slower than the one before), full with the feed-forward and the loss
in pieces, and at last with the blocks' inputs in host memory.

The micro-batch that fits, and what a run that ran out of memory says: how much was asked for and free, the estimate by
part, what to change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flashtrain.errors import UserError
from flashtrain.models.memory_savings import CHECKPOINTING, MemorySavings
from flashtrain.training.memory import FREE_SHARE, GIB, MemoryEstimate

MICRO_BATCH_CAP = 64
AUTO = "auto"
# Pieces large enough that their matrix products run at full rate, and small beside any model's activations.
FFN_CHUNK = 16384
LOSS_CHUNK = 2048

Estimate = Callable[[int, MemorySavings], MemoryEstimate]  # of a micro-batch with these savings


def too_large(one: MemoryEstimate, free_bytes: int) -> UserError:
    """What to raise where not even one sample fits, of which this is the estimate."""
    allowed, parts = FREE_SHARE * free_bytes, one.parts()
    fixed = sum(parts[name] for name in ("weights", "gradients", "optimizer"))
    return UserError(
        f"one sample needs an estimated {one.total / GIB:.1f} GiB ({parts['activations'] / GIB:.1f} activations kept,"
        f" {parts['at work'] / GIB:.1f} at work, {fixed / GIB:.1f} weights with their"
        f" gradients and optimiser states) but {allowed / GIB:.1f} GiB ({FREE_SHARE:.0%} of {free_bytes / GIB:.1f} GiB"
        " free) may be used; choose memory=auto, a shorter context, a smaller model, attention=flash or"
        " trainer.strategy=fsdp (or context) on more devices"
    )


def largest_micro_batch(samples: int, fits: Callable[[int], bool], cap: int = MICRO_BATCH_CAP) -> int | None:
    """The largest divisor of `samples`, at most `cap`, that fits; None where not even one sample does."""
    sizes = (size for size in range(min(samples, cap), 0, -1) if samples % size == 0)
    return next((size for size in sizes if fits(size)), None)


@dataclass(frozen=True)
class Room:
    """Free memory in bytes: of the device, and of its host (None where unknown, 0 where nothing may be offloaded)."""

    device: int | None
    host: int | None = None

    def holds(self, estimate: MemoryEstimate) -> bool:
        """Whether the estimate fills no more than FREE_SHARE of either."""
        device = self.device is None or estimate.total <= FREE_SHARE * self.device
        return device and self.holds_host(estimate)

    def holds_host(self, estimate: MemoryEstimate) -> bool:
        return self.host is None or estimate.host <= FREE_SHARE * self.host


@dataclass(frozen=True)
class MemoryOption:
    """One way to run: these savings with this micro-batch, what it is estimated to need, and whether that fits."""

    savings: MemorySavings
    micro_batch: int
    estimate: MemoryEstimate
    fits: bool

    def line(self) -> str:
        """Name, estimate and micro-batch, as mode=plan prints them."""
        host = f", {self.estimate.host / GIB:.1f} GiB in host memory" if self.estimate.host else ""
        verdict = "" if self.fits else " - does not fit"
        return (
            f"{option_words(self.savings):<78}{self.estimate.total / GIB:8.1f} GiB, "
            f"micro-batch {self.micro_batch}{host}{verdict}"
        )


def candidates(
    checkpointing: str = AUTO, *, offload: bool = False, ffn_chunk: int | None = None, loss_chunk: int | None = None
) -> list[MemorySavings]:
    """The savings to try, cheapest first; only one where `checkpointing` names a kind. What is given stays."""
    if checkpointing != AUTO:
        return [MemorySavings(checkpointing, offload, ffn_chunk, loss_chunk)]
    pieces = (ffn_chunk or FFN_CHUNK, loss_chunk or LOSS_CHUNK)
    resident = [MemorySavings(kind, False, ffn_chunk, loss_chunk) for kind in CHECKPOINTING]
    offloaded = MemorySavings("full", True, *pieces)
    return [offloaded] if offload else [*resident, MemorySavings("full", False, *pieces), offloaded]


def memory_options(
    tried: Sequence[MemorySavings], samples: int, micro_batch: int | None, room: Room, estimate: Estimate
) -> list[MemoryOption]:
    """Each of the savings with the micro-batch that was asked for, or the largest that fits (1 where none does).

    samples: of a device and optimiser step.
    """
    options = []
    for savings in tried:
        size = micro_batch if micro_batch is not None else _largest(samples, room, estimate, savings)
        needed = estimate(size, savings)
        options.append(MemoryOption(savings, size, needed, room.holds(needed)))
    return options


def choose_option(options: Sequence[MemoryOption], room: Room) -> MemoryOption:
    """The first that fits; else the last whose part in host memory does, for estimates are on the safe side.

    Raises UserError where only more host memory than there is would do.
    """
    for option in options:
        if option.fits:
            return option
    possible = [option for option in options if room.holds_host(option.estimate)]
    if not possible:
        needed = options[-1].estimate.host
        raise UserError(
            f"memory.offload=true would put {needed / GIB:.1f} GiB into host memory, of which "
            f"{(room.host or 0) / GIB:.1f} GiB are free here (on a CPU there is nothing to offload): choose "
            "memory.offload=false, a shorter context or fewer samples at once (trainer.micro_batch)."
        )
    return possible[-1]


def option_words(savings: MemorySavings) -> str:
    """The settings that ask for these savings, such as "memory=full memory.ffn_chunk=16384"."""
    words = [f"memory={savings.checkpointing}"]
    words += ["memory.offload=true"] if savings.offload else []
    words += [f"memory.ffn_chunk={savings.ffn_chunk}"] if savings.ffn_chunk else []
    words += [f"memory.loss_chunk={savings.loss_chunk}"] if savings.loss_chunk else []
    return " ".join(words)


def _largest(samples: int, room: Room, estimate: Estimate, savings: MemorySavings) -> int:
    if room.device is None:
        return samples
    return largest_micro_batch(samples, lambda size: room.holds(estimate(size, savings))) or 1


# How PyTorch, CUDA and cuBLAS say it where they do not raise torch.OutOfMemoryError.
_SAID = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", "cudaErrorMemoryAllocation")
SUGGESTIONS = 3


class OutOfMemory(UserError):
    """The device's memory did not suffice. One line; the run's last checkpoint is untouched."""

    status = 3


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out, on a GPU or in main memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SAID)


def out_of_memory_line(
    error: BaseException,
    estimate: MemoryEstimate | None,
    *,
    free_bytes: int | None,
    alternatives: Sequence[MemoryOption] = (),
    saved: Path | None = None,
    advice: str | None = None,
) -> str:
    """The one line to end with.

    estimate: of the run, None where its model has none. free_bytes: when the run began. alternatives: ways to run that
    need less, the cheapest in time first. saved: the run folder, where it holds a checkpoint to go on from.
    advice: what to change, in place of what holds for language models.
    """
    parts = [f"out of memory: {_what_happened(str(error))}"]
    if estimate is not None:
        sizes = ", ".join(f"{name} {size / GIB:.1f}" for name, size in estimate.parts().items())
        parts.append(f"The estimate was {estimate.total / GIB:.1f} GiB ({sizes})")
    if free_bytes is not None:
        parts.append(f"{free_bytes / GIB:.1f} GiB were free at the start")
    parts.append(f"To change: {advice or _what_to_change(alternatives)}")
    if saved is not None:
        parts.append(f"The last checkpoint is kept: resume={saved} goes on from it")
    return ". ".join(parts) + "."


def _what_happened(text: str) -> str:
    """PyTorch's long report in a few words: how much was asked for, and how much of what was free."""
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", text)
    free = re.search(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", text)
    if asked is None:
        return text.splitlines()[0].rstrip(". ") if text else "no memory left"
    told = f"{asked[1]} more were asked for"
    return told if free is None else f"{told} with {free[2]} of {free[1]} free"


def _what_to_change(alternatives: Sequence[MemoryOption]) -> str:
    settings = [
        f"{option_words(option.savings)} trainer.micro_batch={option.micro_batch} "
        f"(estimated {option.estimate.total / GIB:.1f} GiB)"
        for option in alternatives[:SUGGESTIONS]
    ]
    always = "a shorter context=, a smaller model.size=, or trainer.strategy=fsdp (or context) on more devices"
    return " or ".join([*settings, always])
