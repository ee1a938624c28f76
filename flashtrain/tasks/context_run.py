"""A run in which devices share each sequence: its settings as plain arguments, and what it will do, in words.

S sequence, R devices that share it (settings.context_degree), n tokens that one of them holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashtrain.errors import UserError
from flashtrain.models.attention import Attention
from flashtrain.models.generation import row_mask
from flashtrain.models.gpt2_config import SIZES
from flashtrain.models.trainable import DecoderShape, Trainable
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain.training.memory import GIB, PRECISIONS
from flashtrain_kernels import masks

if TYPE_CHECKING:
    from flashtrain.distributed.context.methods import Choice

# What computes layouts and ways is imported where it is used: most runs share no sequence.
MIB = 2**20


def check_heads(settings: Settings) -> None:
    """Raise UserError where trainer.context_way cannot share the heads of a model that the settings tell all about.

    What starts from weights, or is a user's own model, is looked at once it is there (check_model).
    """
    if not settings.shares_sequences or settings.weights is not None or settings.model.size not in SIZES:
        return
    if settings.model.name in ("gpt2", "modern"):
        size = SIZES[settings.model.size]
        _choice(settings, size.heads, size.modern_kv_heads if settings.model.name == "modern" else size.heads, 64, 1)


def check_shape(settings: Settings, shape: DecoderShape) -> None:
    """Raise UserError where trainer.context_way cannot share the heads of this shape."""
    if settings.shares_sequences:
        _choice(settings, shape.heads, shape.kv_heads, shape.head_dim, 1)


def check_model(settings: Settings, model: Trainable) -> None:
    """Raise UserError for a model whose attention would see one device's tokens only, or cannot be shared so."""
    if not settings.shares_sequences:
        return
    if not model.shares_sequences:
        raise UserError(
            f"model={settings.model.name} ({type(model).__name__}) has no flashtrain.Attention, so a sequence cannot "
            "be sharded over devices. Use model=gpt2, modern or huggingface, or trainer.strategy=fsdp."
        )
    for attention in (module for module in model.modules() if isinstance(module, Attention)):
        _choice(settings, attention.heads, attention.kv_heads, attention.head_dim, 1)
    if model.shape is not None:
        check_shape(settings, model.shape)


def attention_choice(settings: Settings, hardware: Hardware, shape: DecoderShape, micro_batch: int) -> Choice:
    """The context-parallel method that the run will use for a micro-batch of this model."""
    held = micro_batch * tokens_held(settings)
    number = PRECISIONS[hardware.precision][2]
    return _choice(settings, shape.heads, shape.kv_heads, shape.head_dim, held, number)


def exchange_bytes_of(settings: Settings, hardware: Hardware, shape: DecoderShape, micro_batch: int) -> int:
    """What the exchange needs of a device's memory; 0 where devices share no sequence."""
    if settings.context_degree == 1:
        return 0
    from flashtrain.distributed.context.exchange_memory import exchange_bytes

    return exchange_bytes(attention_choice(settings, hardware, shape, micro_batch))


def tokens_held(settings: Settings) -> int:
    """n, of one row."""
    return -(-settings.context // settings.context_degree)


def describe_context(settings: Settings, hardware: Hardware, model: Trainable, micro_batch: int) -> str:
    """A few words for the line that says what is about to be trained; "" where devices share no sequence."""
    if not settings.shares_sequences:
        return ""
    method = context_columns(settings, hardware, model, micro_batch)["context_way"]
    return f", each sequence over {settings.context_degree} devices ({method})"


def context_columns(settings: Settings, hardware: Hardware, model: Trainable, micro_batch: int) -> dict[str, Any]:
    """What the summary row says of devices that share sequences; empty where none do.

    For a model that is not flashtrain's own this is trainer.context_way as given.
    """
    if not settings.shares_sequences:
        return {}
    method = settings.trainer.context_way
    if model.shape is not None:
        method = attention_choice(settings, hardware, model.shape, micro_batch).method
    return {"context_parallel": settings.context_degree, "context_way": method}


def plan_lines(settings: Settings, hardware: Hardware, model: Trainable, micro_batch: int) -> list[str]:
    """What mode=plan says of devices that share a sequence: the mesh, the method and its reason, layout, traffic."""
    shape = model.shape
    if not settings.shares_sequences or shape is None:
        return []
    choice = attention_choice(settings, hardware, shape, micro_batch)
    degree, moved = settings.context_degree, choice.traffic
    return [
        f"devices: {settings.data_ranks} (data) x {degree} (context); weights, gradients and optimiser states are "
        f"sharded over all {settings.trainer.ranks}",
        f"context-parallel method: {choice.reason}",
        f"communication: a device sends {_size(moved.forward)} forward and {_size(moved.backward)} backward for each "
        f"of {shape.layers} layers and each micro-batch",
        *_layout_lines(settings),
    ]


def _layout_lines(settings: Settings) -> list[str]:
    """Of rows that are one causal sequence each; what documents change is known only when they are read."""
    from flashtrain.distributed.context.layouts import LAYOUTS
    from flashtrain.distributed.context.needed_keys import needed_keys
    from flashtrain.distributed.context.work import attention_work, imbalance, visible_keys
    from flashtrain.tasks.components import make_mask

    causal = masks.causal(settings.context)
    layout = LAYOUTS[settings.trainer.context_layout](causal, settings.context_degree)  # which shards the rows
    make = make_mask(settings)
    mask = (None if make is None else row_mask(make, settings.context, causal.queries.device)) or causal
    uneven = imbalance(attention_work(layout, visible_keys(mask)))
    needed = max(sum(map(len, of_rank)) for of_rank in needed_keys(layout, mask))
    of_what, most = ("a row of one document", "at most ") if settings.within_documents else ("a row", "")
    return [
        f"layout: {settings.trainer.context_layout}, {layout.held:,} tokens a device in blocks of {layout.block:,}; "
        f"for {of_what} the busiest device attends {uneven:.2f} times the mean and needs the keys and values of "
        f"{most}{needed:,} tokens of others",
    ]


def _choice(settings: Settings, heads: int, kv_heads: int, head_dim: int, held: int, bytes_each: int = 2) -> Choice:
    from flashtrain.distributed.context.methods import choose_method
    from flashtrain.distributed.context.traffic import Sizes

    sizes = Sizes(settings.context_degree, heads, kv_heads, head_dim, held, bytes_each)
    return choose_method(settings.trainer.context_way, sizes)


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.2f} MiB"
