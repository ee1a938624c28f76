"""What context parallelism, in which devices share each sequence, adds to a run's checks, memory
estimate and plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashtrain.errors import UserError
from flashtrain.models.attention import Attention
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.generation import row_mask
from flashtrain.models.layer_spec import mixers
from flashtrain.models.trainable import DecoderShape, Trainable
from flashtrain.settings.mask import MaskSettings
from flashtrain.settings.settings import Settings
from flashtrain.settings.text import SequenceSharding
from flashtrain.tasks.attention_masks import make_mask
from flashtrain.training.memory import GIB, PRECISIONS
from flashtrain_kernels import masks

if TYPE_CHECKING:
    from flashtrain.distributed.context.methods import Choice

MIB = 2**20
STATES = "states"  # the method where no layer has attention


def check_shape(sharding: SequenceSharding | None, shape: DecoderShape) -> None:
    """Raise UserError if a layer of this shape cannot be sharded over devices, or if
    trainer.context_parallel_method cannot share its heads."""
    if sharding is None:
        return
    for mixer in dict.fromkeys(layer.mixer for layer in shape.layers):
        if mixer.crosses_devices is None:
            raise UserError(
                f"layers of {mixer.kind} with context_parallel={sharding.degree}: "
                "devices cannot share their sequences. Use trainer.strategy=fsdp or ddp."
            )
    for attention in dict.fromkeys(mixers(shape.layers, AttentionSpec)):
        _choice(sharding, attention, 1)


def check_model(sharding: SequenceSharding | None, model: Trainable, name: str) -> None:
    """Raise UserError if the model's attention cannot be sharded, or would see only the
    tokens of its own device.

    Args:
        name: model.name, for messages.
    """
    if sharding is None:
        return
    if model.shares_sequences is False:
        raise UserError(
            f"model={name} ({type(model).__name__}) has no flashtrain.Attention, so a sequence "
            "cannot be sharded over devices. Use model=gpt2, llama or huggingface, or "
            "trainer.strategy=fsdp."
        )
    for attention in (module for module in model.modules() if isinstance(module, Attention)):
        _choice(sharding, attention, 1)
    if model.shape is not None:
        check_shape(sharding, model.shape)


def attention_choice(
    sharding: SequenceSharding, precision: str, shape: DecoderShape, micro_batch: int
) -> Choice | None:
    """Return the context-parallel method that the run will use, as chosen for a micro-batch of the
    model's widest attention layer; None without attention (Mamba-2)."""
    held = held_tokens(sharding, micro_batch)
    attentions = mixers(shape.layers, AttentionSpec)
    if not attentions:
        return None
    widest = max(attentions, key=lambda one: one.heads * one.head_dim)
    return _choice(sharding, widest, held, PRECISIONS[precision][2])


def held_tokens(sharding: SequenceSharding, micro_batch: int) -> int:
    """Return the most tokens of a micro-batch that a device holds."""
    held = micro_batch * -(-sharding.context // sharding.degree)
    if sharding.groups == "fixed":
        return held
    from flashtrain.distributed.context.document_plan import room_for

    return room_for(micro_batch * sharding.context, sharding.degree)


def passing(shape: DecoderShape) -> list[Any]:
    """Return the mixers whose states pass from device to device, in the order of their layers."""
    return [one.mixer for one in shape.layers if getattr(one.mixer, "passed", None)]


def exchange_bytes_of(
    sharding: SequenceSharding | None, precision: str, shape: DecoderShape, micro_batch: int
) -> dict[str, int]:
    """Return the bytes of device memory for what devices exchange of attention ("exchange") and of
    states ("state_exchange", and "state_saved" until the backward) in a layer; {} without context
    parallelism."""
    if sharding is None or sharding.degree == 1:
        return {}
    from flashtrain.distributed.context.exchange_memory import exchange_bytes, state_bytes
    from flashtrain.distributed.context.traffic import Sizes

    choice = attention_choice(sharding, precision, shape, micro_batch)
    held, each = held_tokens(sharding, micro_batch), PRECISIONS[precision][2]
    sizes = Sizes(sharding.degree, 1, 1, 1, held, each)
    states = [state_bytes(one.passed, one.columns, sizes, micro_batch) for one in passing(shape)]
    return {
        "exchange": 0 if choice is None else exchange_bytes(choice),
        "state_saved": max((saved for saved, _ in states), default=0),
        "state_exchange": max((temporary for _, temporary in states), default=0),
    }


def context_columns(
    sharding: SequenceSharding | None, precision: str, model: Trainable, micro_batch: int
) -> dict[str, Any]:
    """Return the summary row's columns on context parallelism: its degree and
    method; {} without it.

    The method is the chosen one or, if the model's shape is unknown,
    trainer.context_parallel_method.
    """
    if sharding is None:
        return {}
    method = sharding.method
    if model.shape is not None:
        choice = attention_choice(sharding, precision, model.shape, micro_batch)
        method = STATES if choice is None else choice.method
    return {"context_parallel": sharding.degree, "context_method": method}


def plan_lines(settings: Settings, precision: str, model: Trainable, micro_batch: int) -> list[str]:
    """Return mode=plan's lines on context parallelism: mesh, method with its reason,
    communication and layout."""
    sharding, shape = settings.sharding, model.shape
    if sharding is None or shape is None:
        return []
    lines = [
        f"devices: {settings.data_ranks} (data) x {sharding.degree} (context); weights, "
        f"gradients and optimizer states are sharded over all {settings.trainer.ranks}",
    ]
    choice = attention_choice(sharding, precision, shape, micro_batch)
    if choice is not None:
        moved = choice.traffic
        lines += [
            f"context-parallel method: {choice.method}: {choice.why}",
            f"communication: a device sends {_size(moved.forward)} forward and "
            f"{_size(moved.backward)} backward for each of "
            f"{len(mixers(shape.layers, AttentionSpec))} layers and each micro-batch",
        ]
    states = passing(shape)
    for mixer in dict.fromkeys(states):
        sent = 4 * mixer.passed * micro_batch * (sharding.degree - 1)  # float32
        lines.append(
            f"states: a device sends {_size(sent)} forward and backward for each of its runs of "
            f"tokens and each of {states.count(mixer)} layers of {mixer.kind}, whatever the context"
        )
    if sharding.groups == "planned":
        held = held_tokens(sharding, micro_batch)
        return [
            *lines,
            "groups: planned for each micro-batch: a document is whole on a device where it fits, "
            f"else on as many as pay; a device holds at most {held:,} tokens. The lines above are "
            f"those of a document on all {sharding.degree}",
        ]
    return [*lines, *_layout_lines(sharding, shape, settings.applied_mask)]


def _layout_lines(
    sharding: SequenceSharding, shape: DecoderShape, applied: MaskSettings
) -> list[str]:
    from flashtrain.distributed.context.layouts import LAYOUTS, layout_for
    from flashtrain.distributed.context.needed_keys import needed_keys
    from flashtrain.distributed.context.work import attention_work, imbalance, visible_keys

    causal = masks.causal(sharding.context)
    name = layout_for(sharding.layout, shape.layers, sharding.method)
    layout = LAYOUTS[name](causal, sharding.degree)
    held = f"layout: {name}, {layout.held:,} tokens a device in blocks of {layout.block:,}"
    windows = [one.window for one in mixers(shape.layers, AttentionSpec)]
    if not windows:
        return [held]
    make = make_mask(applied)
    mask = None if make is None else row_mask(make, sharding.context, causal.queries.device)
    if mask is None:
        mask = causal
        if all(windows):  # they count the token itself
            widest = max(one or 0 for one in windows)
            mask = masks.sliding_window(sharding.context, (widest - 1, 0))
    uneven = imbalance(attention_work(layout, visible_keys(mask)))
    needed = max(sum(map(len, of_rank)) for of_rank in needed_keys(layout, mask))
    of_what, most = ("a row of one document", "at most ") if applied.documents else ("a row", "")
    return [
        f"{held}; for {of_what} the busiest device attends {uneven:.2f} times the mean "
        f"and needs the keys and values of {most}{needed:,} tokens of others",
    ]


def _choice(
    sharding: SequenceSharding, heads: AttentionSpec | Attention, held: int, bytes_each: int = 2
) -> Choice:
    from flashtrain.distributed.context.methods import choose_method
    from flashtrain.distributed.context.traffic import Sizes, near_ranks

    near = near_ranks(sharding.degree, sharding.devices)
    sizes = Sizes(
        sharding.degree, heads.heads, heads.kv_heads, heads.head_dim, held, bytes_each, near
    )
    return choose_method(sharding.method, sizes, hybrid=sharding.groups == "fixed")


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.2f} MiB"
