"""The micro-batch and the activation checkpointing of a training, chosen by the estimated memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flashtrain.errors import UserError
from flashtrain.models.activation_checkpointing import MemorySavings
from flashtrain.models.feed_forward import GATED
from flashtrain.models.trainable import DecoderShape, Trainable, inner
from flashtrain.settings.settings import Settings, divisors
from flashtrain.tasks.context_run import exchange_bytes_of
from flashtrain.training.hardware import Hardware, duration, expected_rate
from flashtrain.training.memory import FREE_SHARE, GIB, BlockShape, MemoryEstimate, estimate_memory
from flashtrain.training.memory_choice import (
    AUTO,
    Estimate,
    MemoryOption,
    Room,
    candidates,
    choose_option,
    memory_options,
)

MICRO_BATCH_CAP = 64  # samples of a language model


@dataclass
class Batching:
    """How a device's samples of one optimiser step are cut into micro-batches.

    estimate: of the memory; None for a model whose memory is not known. fits: whether that much is free. options:
    all that were considered, for mode=plan to print. alternatives: those that need less than the chosen, with a
    micro-batch that is as large or the next smaller.
    """

    micro_batch: int
    accumulate: int
    estimate: MemoryEstimate | None
    savings: MemorySavings = field(default_factory=MemorySavings)
    fits: bool = True
    options: Sequence[MemoryOption] = ()
    alternatives: Sequence[MemoryOption] = ()


def choose_batching(settings: Settings, hardware: Hardware, model: Trainable) -> Batching:
    """Of a language model: the micro-batch requested, or the largest whose estimated memory fits what is free.

    Raises UserError where none fits, or where a registered model of another kind has no estimate to choose by.
    """
    samples = settings.samples_per_step // settings.data_ranks
    micro_batch = settings.trainer.micro_batch
    shape = model.shape
    if shape is None:
        return _of_unknown_model(settings, model, samples)
    sizes = [size for size in divisors(samples) if size <= MICRO_BATCH_CAP]
    return choose_micro_batch(
        settings, hardware, micro_batch or sizes, samples, estimator(settings, hardware, model, shape)
    )


def choose_micro_batch(
    settings: Settings, hardware: Hardware, sizes: int | Sequence[int], share: int, estimate: Estimate
) -> Batching:
    """The largest of `sizes` whose estimated memory fits what is free, with the cheapest savings that it takes.

    sizes: what a micro-batch may be, ascending, in samples or tokens; or the one that the settings name. share: of a
    step, on a device, in the same unit. estimate: of a size and savings.
    Raises UserError: not even the smallest fits, and the settings name none.
    """
    free, named = room(settings, hardware), isinstance(sizes, int)
    sizes = [sizes] if isinstance(sizes, int) else sizes
    options = memory_options(_candidates(settings, hardware), sizes, free, estimate)
    chosen = choose_option(options, free)
    if not chosen.fits and not named and free.device is not None:
        fixed = sum(chosen.estimate.parts()[name] for name in ("weights", "gradients", "optimizer"))
        raise UserError(
            f"the smallest micro-batch, {sizes[0]:,}, needs an estimated {chosen.estimate.total / GIB:.1f} GiB "
            f"({fixed / GIB:.1f} of them weights, gradients and optimiser states), and "
            f"{FREE_SHARE * free.device / GIB:.1f} GiB ({FREE_SHARE:.0%} of what is free) may be used. Use "
            "memory=auto, a smaller model, shorter samples, attention=flash, or trainer.strategy=fsdp (or context) on "
            "more devices."
        )
    ladder = _candidates(settings, hardware, checkpointing=AUTO)
    smaller = [size for size in divisors(share) if size < chosen.micro_batch][-1:]
    fewer = memory_options([chosen.savings], smaller, free, estimate) if smaller else []
    kinds = memory_options(ladder, [chosen.micro_batch], free, estimate)
    more = [savings for savings in ladder if savings not in [option.savings for option in options]]
    return Batching(
        chosen.micro_batch,
        share // chosen.micro_batch,
        chosen.estimate,
        chosen.savings,
        chosen.fits,
        options=[*options, *memory_options(more, sizes, free, estimate)],
        alternatives=[*fewer, *(option for option in kinds if option.estimate.total < chosen.estimate.total)],
    )


def estimator(settings: Settings, hardware: Hardware, model: Trainable, shape: DecoderShape) -> Estimate:
    """The estimate of this model, context and machine, for any micro-batch and savings."""
    # What is in no block of a model that does not say it: the embedding, and learned positions.
    tables = (shape.vocab_rows + (shape.context if shape.positions == "learned" else 0)) * shape.embed
    samples, ranks = settings.samples_per_step // settings.data_ranks, settings.trainer.ranks
    sharded, parameters = settings.shards_weights, model.parameter_count()
    blocks = BlockShape(
        shape.layers,
        shape.embed,
        shape.heads,
        shape.ffn,
        gated=shape.activation in GATED,
        rotary=shape.positions == "rotary" and not getattr(shape, "turned_alone", False),
        residual=model.residual,
        kv_width=shape.kv_heads * shape.head_dim,
        query_width=shape.heads * shape.head_dim,
    )

    def estimate(micro_batch: int, savings: MemorySavings) -> MemoryEstimate:
        return estimate_memory(
            parameters,
            blocks,
            vocab_rows=shape.vocab_rows,
            context=settings.context,
            micro_batch=micro_batch,
            savings=savings,
            frozen=getattr(shape, "frozen", 0),
            quantized=getattr(shape, "quantized", 0),
            outside=getattr(shape, "outside", tables),
            states=settings.optimizer.states,
            precision=hardware.precision,
            compiled=compiles(settings, hardware),
            pieces_by_autograd=getattr(shape, "pieces_by_autograd", False),
            attention=hardware.attention,
            master_weights=settings.optimizer.master_weights and not sharded,
            shards=ranks if sharded else 1,
            context_degree=settings.context_degree,
            exchange=exchange_bytes_of(settings, hardware, shape, micro_batch),
            gradients_stay=micro_batch < samples or (ranks > 1 and not sharded),
        )

    return estimate


def compiles(settings: Settings, hardware: Hardware, layout: str = "packed") -> bool:
    """Whether the loss is compiled: as requested, or on GPUs only; never for BERT's padded rows, which have
    another shape in every batch."""
    if layout == "padded":
        return False
    return hardware.kind == "cuda" if settings.trainer.compile is None else settings.trainer.compile


def _candidates(settings: Settings, hardware: Hardware, checkpointing: str | None = None) -> list[MemorySavings]:
    """The savings that the settings allow, or that another `memory.checkpointing` would."""
    memory = settings.memory
    kind = checkpointing or memory.checkpointing
    offload = memory.offload and checkpointing is None
    tried = candidates(kind, offload=offload, ffn_chunk=memory.ffn_chunk, loss_chunk=memory.loss_chunk)
    resident = [savings for savings in tried if not savings.offload]
    return resident if resident and hardware.kind != "cuda" else tried


def room(settings: Settings, hardware: Hardware) -> Room:
    """What a run may fill of the device's and the host's memory."""
    # Ranks start at different moments and must choose alike: several go by the card's size, one by what is free.
    device = hardware.free_memory_bytes if settings.trainer.ranks == 1 else hardware.total_memory_bytes
    if hardware.kind != "cuda":
        return Room(device, 0)
    host = hardware.host_memory_bytes
    return Room(device, None if host is None else host // settings.trainer.devices)


def _of_unknown_model(settings: Settings, model: Trainable, samples: int) -> Batching:
    name, micro_batch, memory = type(inner(model)).__name__, settings.trainer.micro_batch, settings.memory
    if memory.checkpointing not in (AUTO, "none") or memory.offload or memory.ffn_chunk or memory.loss_chunk:
        raise UserError(
            f"{name} does not support activation checkpointing; only flashtrain's own models do. Use memory=none."
        )
    if micro_batch is None:
        raise UserError(
            f"the memory of {name} cannot be estimated. Set trainer.micro_batch=..., the samples that fit at a time."
        )
    return Batching(micro_batch, samples // micro_batch, None)


def encoder_shape(config: Any, **own: Any) -> BlockShape:
    """What of an encoder's configuration its memory is estimated from. own: fields of the estimate's alone."""
    sizes = (config.layers, config.embed, config.heads, config.ffn)
    rotary, dropout = config.positions != "learned", config.dropout > 0
    return BlockShape(*sizes, gated=config.activation in GATED, rotary=rotary, dropout=dropout, **own)


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
    """The estimate in one line by what it holds, and every option, the chosen one marked; for mode=plan."""
    if batching.estimate is None:
        return []
    estimate = batching.estimate
    further = {"of it exchanged": estimate.exchange, "in host memory": estimate.host}
    held = {**estimate.parts(), **{name: size for name, size in further.items() if size}}
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in held.items())
    options = [f"{'>' if option.savings == batching.savings else ' '} {option.line()}" for option in batching.options]
    return [f"memory: {estimate.total / GIB:.2f} GiB ({parts})", *(options if len(options) > 1 else [])]


def plan_text(
    lines: Sequence[str],
    settings: Settings,
    hardware: Hardware,
    flops: float,
    *,
    at_most: bool = False,
    meant: str = "",
) -> str:
    """What mode=plan prints of a training of so many FLOPs, on all devices together. meant: of how they are counted."""
    rate, how = expected_rate(hardware)
    time = f"{'at most ' if at_most else ''}about {duration(flops / (rate * settings.trainer.ranks))}"
    last = f"time: {time} for {flops:.3g} FLOPs{meant} ({how}), without start-up and validation"
    return "\n".join([*lines, last, "nothing was started; leave out mode=plan to train."])
