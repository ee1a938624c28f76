"""How a device's samples of a step are cut into micro-batches, and which memory savings that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from flashtrain.errors import UserError
from flashtrain.models.gpt2 import GPT2, GPT2Config
from flashtrain.models.memory_savings import MemorySavings, Trainable
from flashtrain.settings.settings import Settings
from flashtrain.tasks.context_run import exchange_bytes_of
from flashtrain.training.hardware import Hardware
from flashtrain.training.memory import MemoryEstimate, estimate_memory
from flashtrain.training.memory_choice import (
    AUTO,
    Estimate,
    MemoryOption,
    Room,
    candidates,
    choose_micro_batch,
    choose_option,
    largest_micro_batch,
    memory_options,
)


@dataclass
class Batching:
    """How a device's samples of one optimiser step are cut into micro-batches.

    estimate: of the memory; None for a model whose memory is not known. fits: whether that much is free. options:
    every way to run, for mode=plan to print. alternatives: those that need less than the chosen, with a micro-batch
    that is as large or the next smaller.
    """

    micro_batch: int
    accumulate: int
    estimate: MemoryEstimate | None
    savings: MemorySavings = field(default_factory=MemorySavings)
    fits: bool = True
    options: Sequence[MemoryOption] = ()
    alternatives: Sequence[MemoryOption] = ()


def choose_batching(settings: Settings, hardware: Hardware, model: Trainable) -> Batching:
    """The micro-batch asked for, or the largest whose estimated memory fits what is free, with the savings it takes.

    Raises UserError where none fits, or where a registered model of another kind has no estimate to choose by.
    """
    samples = settings.samples_per_step // settings.data_ranks
    micro_batch = settings.trainer.micro_batch
    config = getattr(model, "config", None)
    if not isinstance(model, GPT2) or not isinstance(config, GPT2Config):
        return _of_unknown_model(settings, model, samples)
    free = room(settings, hardware)
    estimate = estimator(settings, hardware, model)
    options = memory_options(_candidates(settings, hardware), samples, micro_batch, free, estimate)
    chosen = choose_option(options, free)
    if micro_batch is None and not chosen.fits and free.device is not None:
        choose_micro_batch(samples, free.device, lambda size: estimate(size, chosen.savings))  # says what is missing
    ladder = _candidates(settings, hardware, checkpointing=AUTO)
    more = [savings for savings in ladder if savings not in [option.savings for option in options]]
    return Batching(
        chosen.micro_batch,
        samples // chosen.micro_batch,
        chosen.estimate,
        chosen.savings,
        chosen.fits,
        options=[*options, *memory_options(more, samples, micro_batch, free, estimate)],
        alternatives=_alternatives(chosen, ladder, samples, free, estimate),
    )


def _alternatives(
    chosen: MemoryOption, ladder: Sequence[MemorySavings], samples: int, room: Room, estimate: Estimate
) -> list[MemoryOption]:
    """What to try where the chosen runs out of memory: a smaller micro-batch, and every kind that needs less."""
    size = chosen.micro_batch
    smaller = largest_micro_batch(samples, lambda other: other < size, cap=size)
    fewer = [] if smaller is None else memory_options([chosen.savings], samples, smaller, room, estimate)
    kinds = memory_options(ladder, samples, size, room, estimate)
    return [*fewer, *(option for option in kinds if option.estimate.total < chosen.estimate.total)]


def estimator(settings: Settings, hardware: Hardware, model: GPT2) -> Estimate:
    """The estimate of this model, context and machine, for any micro-batch and savings."""
    config = model.config

    def estimate(micro_batch: int, savings: MemorySavings) -> MemoryEstimate:
        return estimate_memory(
            model.parameter_count(),
            layers=config.layers,
            embed=config.embed,
            heads=config.heads,
            ffn=config.ffn,
            vocab_rows=config.vocab_rows,
            context=settings.context,
            micro_batch=micro_batch,
            kv_width=config.kv_heads * config.head_dim,
            gated=config.activation == "swiglu",
            precision=hardware.precision,
            compiled=compiles(settings, hardware),
            attention=hardware.attention,
            residual=model.residual,
            rotary=config.positions == "rotary",
            master_weights=settings.optimizer.master_weights and not settings.shards_weights,
            shards=settings.trainer.ranks if settings.shards_weights else 1,
            context_degree=settings.context_degree,
            exchange=exchange_bytes_of(settings, hardware, config, micro_batch),
            **asdict(savings),
        )

    return estimate


def compiles(settings: Settings, hardware: Hardware, layout: str = "packed") -> bool:
    """Whether the loss goes through torch.compile: as asked, or on GPUs only; never for BERT's padded rows, which have
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
    name, micro_batch, memory = type(model).__name__, settings.trainer.micro_batch, settings.memory
    if memory.checkpointing not in (AUTO, "none") or memory.offload or memory.ffn_chunk or memory.loss_chunk:
        raise UserError(f"{name} has no memory savings: only flashtrain's own models have; choose memory=none.")
    if micro_batch is None:
        raise UserError(f"the memory of {name} is not known: say trainer.micro_batch=...")
    return Batching(micro_batch, samples // micro_batch, None)
