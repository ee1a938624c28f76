"""Choose the memory savings of a run: the fastest option whose estimated memory fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from flashtrain.errors import UserError
from flashtrain.models.activation_checkpointing import CHECKPOINTING, MemorySavings
from flashtrain.training.memory import FREE_SHARE, GIB, MemoryEstimate

AUTO = "auto"
# Tokens: enough for matmuls at full rate, and few compared with any model's activations.
FFN_CHUNK = 16384
LOSS_CHUNK = 2048

Estimate = Callable[[int, MemorySavings], MemoryEstimate]  # of a micro-batch with these savings


@dataclass(frozen=True)
class Room:
    """Free memory of the device and of its host, in bytes; None if unknown. A host with 0 bytes
    means that nothing may be offloaded."""

    device: int | None
    host: int | None = None

    def holds(self, estimate: MemoryEstimate) -> bool:
        """Return whether the estimate fills at most FREE_SHARE of the free
        memory of device and host."""
        device = self.device is None or estimate.total <= FREE_SHARE * self.device
        return device and self.holds_host(estimate)

    def holds_host(self, estimate: MemoryEstimate) -> bool:
        return self.host is None or estimate.host <= FREE_SHARE * self.host


@dataclass(frozen=True)
class MemoryOption:
    """A choice of memory savings and micro-batch, the memory that a training step is estimated to
    need with it, and whether that fits."""

    savings: MemorySavings
    micro_batch: int
    estimate: MemoryEstimate
    fits: bool

    def line(self) -> str:
        """Return the line that mode=plan prints: settings, estimated memory and micro-batch."""
        host = f", {self.estimate.host / GIB:.1f} GiB in host memory" if self.estimate.host else ""
        verdict = "" if self.fits else " - does not fit"
        return (
            f"{option_words(self.savings):<96}{self.estimate.total / GIB:8.1f} GiB, "
            f"micro-batch {self.micro_batch}{host}{verdict}"
        )


@dataclass
class Batching:
    """The micro-batches into which a device's samples of an optimizer step are cut, and the
    memory that they need."""

    micro_batch: int  # samples, or tokens of BERT on masked text
    accumulate: int  # micro-batches of a step
    estimate: MemoryEstimate | None  # None for a model whose memory cannot be estimated
    savings: MemorySavings = field(default_factory=MemorySavings)
    fits: bool = True  # whether the estimated memory is free
    options: Sequence[MemoryOption] = ()  # everything that was considered, for mode=plan
    # Those that need less memory than the chosen one, at the same or the next smaller micro-batch.
    alternatives: Sequence[MemoryOption] = ()


def candidates(
    checkpointing: str = AUTO,
    *,
    offload: bool = False,
    ffn_chunk: int | None = None,
    loss_chunk: int | None = None,
) -> list[MemorySavings]:
    """List the memory savings to try, fastest first; only one if `checkpointing` is not "auto".
    `offload` and chunks that are given stay as given.

    From fast to slow: activation checkpointing none, selective, full, full with feed-forward and
    loss in chunks, and the last one with the blocks' inputs offloaded to host memory.
    """
    if checkpointing != AUTO:
        return [MemorySavings(checkpointing, offload, ffn_chunk, loss_chunk)]
    chunks = (ffn_chunk or FFN_CHUNK, loss_chunk or LOSS_CHUNK)
    resident = [MemorySavings(kind, False, ffn_chunk, loss_chunk) for kind in CHECKPOINTING]
    offloaded = MemorySavings("full", True, *chunks)
    return [offloaded] if offload else [*resident, MemorySavings("full", False, *chunks), offloaded]


def memory_options(
    tried: Sequence[MemorySavings],
    sizes: Sequence[int],
    room: Room,
    estimate: Estimate,
    layers: int = 0,
) -> list[MemoryOption]:
    """Return for each of the memory savings `tried` the option with the largest micro-batch of
    `sizes` (ascending) that fits or, if none fits, with the smallest.

    Between "none", if that does not fit, and "selective" there is a further option: "selective" in
    as few of the `layers` as fit.

    `estimate` returns the estimated memory of (micro-batch, savings), and `room` is the free
    memory.
    """
    found = [_with_largest(savings, sizes, room, estimate) for savings in tried]
    kinds = [option.savings.checkpointing for option in found[:2]]
    if kinds == ["none", "selective"] and not found[0].fits:
        some = (replace(found[1].savings, layers=number) for number in range(1, layers))
        options = (_with_largest(savings, sizes, room, estimate) for savings in some)
        found[1:1] = [option for option in options if option.fits][:1]
    return found


def _with_largest(
    savings: MemorySavings, sizes: Sequence[int], room: Room, estimate: Estimate
) -> MemoryOption:
    for size in reversed(sizes):
        needed = estimate(size, savings)
        if room.holds(needed):
            return MemoryOption(savings, size, needed, True)
    return MemoryOption(savings, sizes[0], needed, False)


def choose_option(
    options: Sequence[MemoryOption], room: Room, *, planned: bool = False
) -> MemoryOption:
    """Return the first option that fits; else, since estimates err on the high side, the last one
    whose host memory fits.

    Raises UserError if every option needs more host memory than is free, unless the training is
    only `planned` and may offload.
    """
    for option in options:
        if option.fits:
            return option
    possible = [option for option in options if room.holds_host(option.estimate)]
    if not possible and planned and room.host:
        return options[-1]
    if not possible:
        needed = options[-1].estimate.host
        raise UserError(
            f"memory.offload=true needs {needed / GIB:.1f} GiB of host memory, and "
            f"{(room.host or 0) / GIB:.1f} GiB are free (on a CPU nothing can be offloaded). Set "
            "memory.offload=false, a shorter context= or a smaller trainer.micro_batch=."
        )
    return possible[-1]


def option_words(savings: MemorySavings) -> str:
    """Return the settings of these savings, such as "memory.activation_checkpointing=full
    memory.ffn_chunk=16384"."""
    auto = f"{AUTO} ({savings.checkpointing} in {savings.layers} of the layers)"
    words = [f"memory.activation_checkpointing={auto if savings.layers else savings.checkpointing}"]
    words += ["memory.offload=true"] if savings.offload else []
    words += [f"memory.ffn_chunk={savings.ffn_chunk}"] if savings.ffn_chunk else []
    words += [f"memory.loss_chunk={savings.loss_chunk}"] if savings.loss_chunk else []
    return " ".join(words)
