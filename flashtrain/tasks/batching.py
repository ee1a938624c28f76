"""The micro-batch and the activation checkpointing of a training, chosen by
the estimated memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from flashtrain.announce import say
from flashtrain.distributed.sharding import known_blocks
from flashtrain.errors import UserError, first_line
from flashtrain.models.activation_checkpointing import MemorySavings
from flashtrain.models.feed_forward import FeedForward, are_plain
from flashtrain.models.trainable import DecoderShape, Trainable, inner
from flashtrain.settings.settings import Settings, divisors
from flashtrain.tasks.context_run import check_model, exchange_bytes_of, held_tokens
from flashtrain.training.hardware import Hardware, gpu_index
from flashtrain.training.memory import (
    ADAMW_STATES,
    FREE_SHARE,
    GIB,
    PRECISIONS,
    Blocks,
    MemoryEstimate,
    estimate_memory,
)
from flashtrain.training.memory_choice import (
    AUTO,
    Batching,
    Estimate,
    Room,
    candidates,
    choose_option,
    memory_options,
)

MAX_MICRO_BATCH = 64  # samples of a language model


def fit_memory(settings: Settings, hardware: Hardware, model: Trainable) -> Batching:
    """Choose the micro-batch, and set the model's dtype of weights and activation checkpointing to
    those that the estimate of its memory assumes.

    Raises:
        UserError: no micro-batch fits, or the model does not support the strategy
            or the memory settings.
    """
    check_model(settings.sharding, model, settings.model.name)
    if settings.shards_weights:
        known_blocks(model)
    model.keep_in(hardware.precision)
    if settings.model.float8 is not None and settings.mode == "train":
        from flashtrain.training.float8_linear import convert_linears

        convert_linears(model, settings.model.float8)
    batching = choose_batching(settings, hardware, model)
    model.save_memory(batching.savings)
    return batching


def choose_batching(settings: Settings, hardware: Hardware, model: Trainable) -> Batching:
    """Choose the micro-batch of a language model: trainer.micro_batch, or the largest whose
    estimated memory fits. A measured one is set, and so saved with the run's settings.

    Raises:
        UserError: none fits, or the model's memory can be neither estimated nor measured.
    """
    samples = settings.samples_per_step // settings.data_ranks
    micro_batch, shape = settings.trainer.micro_batch, model.shape
    sizes = micro_batch or [size for size in divisors(samples) if size <= MAX_MICRO_BATCH]
    if shape is not None and _is_known(shape):
        estimate = estimator(settings, hardware, model, shape)
        return choose_micro_batch(
            settings, hardware, sizes, samples, estimate, layers=len(shape.layers)
        )
    # A model that has no memory savings refuses all but the first.
    only = _candidates(settings, hardware)[:1]
    if micro_batch is not None:
        return Batching(micro_batch, samples // micro_batch, None, only[0])
    model.save_memory(only[0])
    measured = _measured(settings, hardware, model)
    chosen = choose_micro_batch(settings, hardware, sizes, samples, measured, only)
    if settings.mode == "train":
        settings.trainer.micro_batch = chosen.micro_batch
    return chosen


def _measured(settings: Settings, hardware: Hardware, model: Trainable) -> Estimate:
    """Return a function that estimates the memory of a training by what one sample takes."""
    from flashtrain.training.memory_measure import bytes_of_sample

    planned = next(model.parameters()).device.type == "meta"
    here = f"cuda:{gpu_index()}" if hardware.kind == "cuda" and not planned else "cpu"
    device = torch.device("meta" if planned else here)
    tokens = -(-settings.context // settings.context_degree)
    try:
        each = bytes_of_sample(model.to(device), tokens, hardware.precision, device)
    except Exception as problem:
        raise UserError(
            f"the memory of {type(inner(model)).__name__} cannot be estimated: "
            f"{first_line(problem)}. Set trainer.micro_batch=..., the samples that fit at a time."
        ) from problem
    finally:
        model.to("meta" if planned else "cpu")
    say(f"micro-batch by measurement: one sample takes {each / 2**20:,.1f} MiB")
    weight, copy, _ = PRECISIONS[hardware.precision]
    shards = settings.trainer.ranks if settings.shards_weights else 1
    parameters = [(one.numel(), one.requires_grad) for one in model.parameters()]
    every, trained = (sum(n for n, grad in parameters if grad >= one) for one in (False, True))
    states = {"full": 4, "8bit": 1, "host": 0}[settings.optimizer.states] * ADAMW_STATES

    def estimate(micro_batch: int, savings: MemorySavings) -> MemoryEstimate:
        fixed = ((weight + copy) * every, weight * trained, states * trained)
        weights, gradients, optimizer = (size // shards for size in fixed)
        return MemoryEstimate(weights, gradients, optimizer, micro_batch * each, logits=0)

    return estimate


def _is_known(shape: DecoderShape) -> bool:
    """Return whether every layer's mixer states its memory, so that a training's can be
    estimated."""
    found = (
        one.mixer.memory(tokens=1, context=1, activation=2, attention="flash")
        for one in set(shape.layers)
    )
    return all(memory is not None for memory in found)


def choose_micro_batch(
    settings: Settings,
    hardware: Hardware,
    sizes: int | Sequence[int],
    share: int,
    estimate: Estimate,
    tried: Sequence[MemorySavings] = (),
    layers: int = 0,
) -> Batching:
    """Choose the largest micro-batch whose estimated memory fits, with the cheapest memory
    savings that allow it.

    Args:
        sizes: the possible micro-batches, ascending, in samples or tokens; an int is the one
            that the settings name.
        share: samples or tokens of an optimizer step on one device.
        estimate: returns the estimated memory of (micro-batch, MemorySavings).
        tried: the only memory savings that there are; (): those that the settings allow.
        layers: of the model, a part of which may be recomputed; 0: all or none.

    Raises:
        UserError: not even the smallest of several sizes fits, and mode is not plan.
    """
    planned = settings.mode == "plan"
    free, named = room(settings, hardware), isinstance(sizes, int)
    sizes = [sizes] if isinstance(sizes, int) else sizes
    first = tried or _candidates(settings, hardware)
    options = memory_options(first, sizes, free, estimate, layers)
    chosen = choose_option(options, free, planned=planned)
    if not chosen.fits and not named and not planned and free.device is not None:
        fixed = sum(chosen.estimate.parts()[name] for name in ("weights", "gradients", "optimizer"))
        raise UserError(
            f"the smallest micro-batch, {sizes[0]:,}, needs an estimated "
            f"{chosen.estimate.total / GIB:.1f} GiB ({fixed / GIB:.1f} of them weights, gradients "
            f"and optimizer states), and {FREE_SHARE * free.device / GIB:.1f} GiB "
            f"({FREE_SHARE:.0%} of what is free) may be used. Use "
            "memory.activation_checkpointing=auto, a smaller model, shorter samples, "
            "attention=flash, or trainer.strategy=fsdp (or context_parallel) on more devices."
        )
    every = tried or _candidates(settings, hardware, checkpointing=AUTO)
    smaller = [size for size in divisors(share) if size < chosen.micro_batch][-1:]
    fewer = memory_options([chosen.savings], smaller, free, estimate) if smaller else []
    every = list(dict.fromkeys([*(option.savings for option in options), *every]))
    kinds = memory_options(every, [chosen.micro_batch], free, estimate)
    return Batching(
        chosen.micro_batch,
        share // chosen.micro_batch,
        chosen.estimate,
        chosen.savings,
        chosen.fits,
        options=kinds,
        alternatives=[
            *fewer,
            *(option for option in kinds if option.estimate.total < chosen.estimate.total),
        ],
    )


def estimator(
    settings: Settings, hardware: Hardware, model: Trainable, shape: DecoderShape
) -> Estimate:
    """Return a function that estimates the memory of this training for any
    micro-batch and memory savings."""
    samples, ranks = settings.samples_per_step // settings.data_ranks, settings.trainer.ranks
    sharded = settings.shards_weights
    parameters = model.parameter_count()
    sharding, context = settings.sharding, settings.context
    if sharding is not None:
        context = held_tokens(sharding, 1) * sharding.degree
    dense = hardware.attention == "sdpa" and settings.applied_mask.documents
    attention = "masked" if dense else hardware.attention
    largest = 0
    if len(set(shape.layers)) > 1:
        largest = max(
            sum(one.numel() for one in block.parameters()) for block in cast(Any, model).blocks
        )
    plain = settings.model.float8 is None and all(
        are_plain(one.up, one.down) for one in model.modules() if isinstance(one, FeedForward)
    )
    blocks = Blocks(
        shape.embed, shape.layers, residual=model.residual, largest=largest, plain=plain
    )

    def estimate(micro_batch: int, savings: MemorySavings) -> MemoryEstimate:
        return estimate_memory(
            parameters,
            blocks,
            vocab_rows=shape.vocab_rows,
            context=context,
            micro_batch=micro_batch,
            savings=savings,
            frozen=shape.frozen,
            quantized=shape.quantized,
            outside=shape.outside,
            states=settings.optimizer.states,
            precision=hardware.precision,
            compiled=compiles(settings, hardware),
            attention=attention,
            master_weights=settings.optimizer.master_weights and not sharded,
            shards=ranks if sharded else 1,
            context_degree=settings.context_degree,
            **exchange_bytes_of(sharding, hardware.precision, shape, micro_batch),
            gradients_stay=micro_batch < samples or (ranks > 1 and not sharded),
            kernels=hardware.kind == "cuda",
        )

    return estimate


def compiles(settings: Settings, hardware: Hardware, layout: str = "packed") -> bool:
    """Return whether the loss is compiled: trainer.compile or, if that is null,
    whether the device is a GPU.

    Padded rows (`layout`), which have another shape in every batch, are never compiled.
    """
    if layout == "padded":
        return False
    return hardware.kind == "cuda" if settings.trainer.compile is None else settings.trainer.compile


def _candidates(
    settings: Settings, hardware: Hardware, checkpointing: str | None = None
) -> list[MemorySavings]:
    """Return the memory savings to try, fastest first, as the settings allow; `checkpointing`
    replaces memory.activation_checkpointing."""
    memory = settings.memory
    kind = checkpointing or memory.activation_checkpointing
    offload = memory.offload and checkpointing is None
    tried = candidates(
        kind, offload=offload, ffn_chunk=memory.ffn_chunk, loss_chunk=memory.loss_chunk
    )
    resident = [savings for savings in tried if not savings.offload]
    return resident if resident and hardware.kind != "cuda" else tried


def room(settings: Settings, hardware: Hardware) -> Room:
    """Return the free memory, on the device and on its host, to which this run's estimate is
    compared."""
    # Ranks start at different moments and must choose alike: several go by the card's size,
    # one by what is free.
    device = (
        hardware.free_memory_bytes if settings.trainer.ranks == 1 else hardware.total_memory_bytes
    )
    if hardware.kind != "cuda":
        return Room(device, 0)
    host = hardware.host_memory_bytes
    return Room(device, None if host is None else host // settings.trainer.devices)


def encoder_blocks(config: Any, **own: Any) -> Blocks:
    """Return the Blocks of a BertConfig or ClassifierConfig, for estimate_encoder_memory; `own` are
    further fields of Blocks."""
    return Blocks(config.embed, config.layer_specs, dropout=config.dropout > 0, **own)


def memory_words(batching: Batching) -> str:
    """Return the memory savings and the estimate as text, for the line that
    announces a training."""
    savings = batching.savings.describe()
    if batching.estimate is None:
        return f", {savings}" if savings else ""
    doubt = "" if batching.fits else f", more than {FREE_SHARE:.0%} of what is free"
    return (
        f"{', ' if savings else ''}{savings} (estimated "
        f"{batching.estimate.total / GIB:.1f} GiB{doubt})"
    )


def memory_columns(batching: Batching) -> dict[str, Any]:
    """Return the summary row's columns on memory: the savings and the estimate in GiB."""
    needed = batching.estimate
    return {
        "memory": batching.savings.describe() or "none",
        "memory_estimate_gib": None if needed is None else round(needed.total / GIB, 2),
    }
