"""transformers' mask function for our kernels: intervals of keys for each query
instead of an S x S tensor.

Shapes: B batch, S sequence (Sq queries, Sk keys).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.integrations import huggingface_mask_rules as mask_rules
from flashtrain.integrations.huggingface_context import inputs_of
from flashtrain.integrations.huggingface_document_search import (
    documents_beside_padding,
    documents_in,
    documents_of,
)
from flashtrain.integrations.huggingface_mask_rules import Rules
from flashtrain.models.sharded_sequence import ShardedSequence, sharded_sequence
from flashtrain_kernels.environment import autocast_dtype
from flashtrain_kernels.masks import Mask
from flashtrain_kernels.masks.rows import ordinals

MaskFunction = Callable[..., Any]


class AttentionMask(NamedTuple):
    """The mask that our mask function gives to layers in place of a 4-D tensor; only our
    attention can read it."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    causal: bool = False  # as in flash_attn_func
    window_size: tuple[int, int] = (-1, -1)  # as in flash_attn_func
    mask: Mask | None = None  # intervals of keys
    # (B, 1, Sq, Sk), -inf for hidden pairs, for masks that intervals cannot represent.
    bias: Tensor | None = None
    settled: bool = False  # whether packed documents are included already

    # transformers reads these before it passes a mask to the layers.
    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch, 1, self.seqlen_q, self.seqlen_k)

    @property
    def ndim(self) -> int:
        return 4

    def contiguous(self) -> AttentionMask:
        return self


@torch.compiler.disable  # it inspects closures and reads padding
def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | AttentionMask | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> AttentionMask | None:
    """Make the mask of one kind of layer (full, sliding, ...); the arguments are those of
    transformers' sdpa_mask.

    If an attention_mask with padding is passed, the device is synchronized once, to find on which
    sides padding is and whether rows hold documents. Under torch.compile the graph breaks here.

    Args:
        attention_mask: (B, keys so far) bool, False for padding; or an earlier result of
            this function, which is returned as it is (generation with a static cache
            makes masks in advance).

    Returns:
        The mask. None means the layer's default, as for sdpa: causal where is_causal is True and
        Sq == Sk; a single query sees every key.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if isinstance(attention_mask, AttentionMask):
        return attention_mask
    function: MaskFunction = causal_mask_function if mask_function is None else mask_function
    sequence = sharded_sequence()
    if sequence is not None and q_length == kv_length:
        found = _of_whole(sequence, None if use_vmap else function, batch_size, q_length, device)
        if found is not None:
            return found
    rules = mask_rules.read(function)
    # A caller's own overlay or blocks of image tokens: transformers' matrix.
    if use_vmap or rules is None:
        visible: Any = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=cast(int, q_offset),
            kv_offset=kv_offset,
            mask_function=function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        return AttentionMask(batch_size, q_length, kv_length, bias=dense_bias(visible, dtype))

    may_skip = allow_is_causal_skip or allow_is_bidirectional_skip
    if attention_mask is not None and rules.documents is None and q_length == kv_length:
        rules = rules._replace(documents=documents_beside_padding(q_length))
    padding = None if attention_mask is None else _of_keys(attention_mask, kv_offset, kv_length)
    found = _of_rules(
        rules, batch_size, q_length, kv_length, q_offset, kv_offset, padding, may_skip, device
    )
    head_dim = _head_dim(config)
    if found is None or found.mask is None or head_dim is None:
        return found
    planned = found.mask.planned(head_dim, _computed_in(dtype, found.mask.queries.device.type))
    return AttentionMask(batch_size, q_length, kv_length, mask=planned)


@torch.compiler.disable
def _of_whole(
    sequence: ShardedSequence,
    function: MaskFunction | None,
    batch: int,
    tokens: int,
    device: torch.device | str,
) -> AttentionMask | None:
    """Return the mask of the whole of a sharded sequence, in place of the mask of this device's
    tokens that transformers asks for; None if the tokens are not its shard."""
    inputs = inputs_of(sequence)
    if inputs is None or tokens != sequence.held:
        return None
    rules = None if function is None else mask_rules.read(function)
    if function is None or rules is None:
        raise UserError(
            "an unknown mask function under context parallelism: expected causal, window, "
            "chunk and document rules of transformers. Use another strategy (fsdp, ddp)."
        )
    length, padding = sequence.length, inputs.padding
    # The rules' tensors describe this device's tokens: they are made again for all,
    # as transformers does.
    if rules.documents is not None and inputs.positions is not None:
        positions = inputs.positions.expand(batch, -1)
        rules = rules._replace(documents=documents_of(positions), positions=positions)
    elif padding is not None:
        rules = rules._replace(documents=documents_in(inputs.positions, padding))
    real = None if padding is None else padding.to(torch.bool)
    if rules.chunk_start is not None:
        none = torch.zeros_like(rules.chunk_start)
        rules = rules._replace(chunk_start=none if real is None else real.cumsum(1).eq(0).sum(1))
    found = _of_rules(rules, batch, length, length, 0, 0, real, True, device)
    if found is None:
        return AttentionMask(batch, length, length, causal=True)
    if found.mask is not None and found.mask.keys is not None:
        raise UserError(
            "attention_mask with padding between tokens under context parallelism: "
            "expected padding at the ends of rows only."
        )
    return found


def _of_rules(
    rules: Rules,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    padding: Tensor | None,
    may_skip: bool,
    device: torch.device | str,
) -> AttentionMask | None:
    """Return the mask of these rules and padding, without a plan; None as in attention_mask.
    padding: (B, Sk) bool, False for padding. may_skip: whether it may have no tensors."""
    one_sided = False
    if padding is not None and may_skip:
        none, one_sided, packed = _look_at(padding, rules.documents)
        padding = None if none else padding
        rules = rules if packed else rules._replace(documents=None)
    if padding is None and may_skip and isinstance(q_offset, int):
        plain, found = _without_tensors(
            rules, batch_size, q_length, kv_length, q_offset - kv_offset
        )
        if plain:
            return found

    query = torch.arange(q_length, device=device) + q_offset
    low, high, start = mask_rules.intervals(rules, query, kv_offset, kv_length, batch_size)
    row = torch.arange(batch_size, device=device, dtype=torch.int32)[:, None].expand(-1, q_length)
    number = row if rules.documents is None else ordinals(start).to(torch.int32)
    keys = None
    if padding is not None:
        first, last = _ends(padding)
        low = torch.maximum(low, first)
        high = torch.minimum(high, last)
        start = torch.maximum(start, first)
        if not one_sided:
            # A padded key between real ones gets a position outside of every interval.
            index = torch.arange(kv_length, device=device, dtype=torch.int32)
            keys = torch.where(padding, index, -1)
    position = (query - kv_offset).to(torch.int32).expand(batch_size, -1)
    rows = torch.stack((low, high, position, start, number))
    return AttentionMask(batch_size, q_length, kv_length, mask=Mask(rows, keys, kv_length))


def dense_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a 4-D mask of transformers, bool (True: visible) or additive, to a bias with
    -inf for hidden pairs."""
    # transformers hides by the dtype's lowest number. -inf hides fully, and adding a score
    # to it cannot overflow.
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
            ~mask, float("-inf")
        )
    lowest = torch.finfo(mask.dtype).min
    return torch.where(mask <= lowest / 2, float("-inf"), mask).to(dtype)


def _without_tensors(
    rules: Rules, batch: int, seqlen_q: int, seqlen_k: int, shift: int
) -> tuple[bool, AttentionMask | None]:
    """Express the rules by causal and window_size alone. Return (whether they can be, the
    mask; None: no mask is needed). shift: the first query's index among the keys."""
    if rules.documents is not None or rules.chunk is not None:
        return False, None
    # Drop bounds that no query of this call reaches.
    left = None if rules.left is None or shift + seqlen_q - 1 - rules.left <= 0 else rules.left
    right = None if rules.right is None or shift + rules.right >= seqlen_k - 1 else rules.right
    if left is None and right is None:
        # Explicit for several queries: some layers report is_causal in a model that is
        # configured not to be.
        return True, None if seqlen_q == 1 else AttentionMask(batch, seqlen_q, seqlen_k)
    if shift + seqlen_q != seqlen_k:  # not aligned bottom-right, as the kernels' window is
        return False, None
    if left is None and right == 0 and seqlen_q == seqlen_k:
        return True, None
    window = (-1 if left is None else left, -1 if right is None else right)
    return True, AttentionMask(batch, seqlen_q, seqlen_k, causal=right == 0, window_size=window)


def _of_keys(attention_mask: Tensor, kv_offset: int, kv_length: int) -> Tensor:
    """Return (B, Sk) bool, which of this call's keys are real; keys past the end of attention_mask
    are False: they are a static cache's, not yet written."""
    missing = kv_offset + kv_length - attention_mask.shape[-1]
    given = attention_mask.to(torch.bool)
    if missing > 0:
        given = torch.nn.functional.pad(given, (0, missing))
    return given[:, kv_offset : kv_offset + kv_length]


def _ends(padding: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the index of each row's first real key, one past that of its last), each (B, 1)
    int32; both are 0 where no key is real."""
    real = padding.to(torch.int32)
    first = real.argmax(1)
    last = torch.where(padding.any(1), real.shape[1] - real.flip(1).argmax(1), 0)
    return first.to(torch.int32)[:, None], last.to(torch.int32)[:, None]


def _look_at(padding: Tensor, documents: Tensor | None) -> tuple[bool, bool, bool]:
    """Return (whether every key is real, whether no row has padding between real keys, whether
    a row has several documents); all False for meta tensors."""
    if padding.is_meta:
        return False, False, False
    first, last = _ends(padding)
    whole = (last - first)[:, 0] == padding.sum(1)
    several = padding.new_zeros(1) if documents is None else documents != documents[:, :1]
    every, runs, packed = torch.stack((padding.all(), whole.all(), several.any())).tolist()
    return every, runs, packed


def _head_dim(config: Any) -> int | None:
    """Return the layers' head dimension, for which the mask is planned; None if it is unknown, so
    that each layer plans its own."""
    try:
        given = getattr(config, "head_dim", None)
        hidden = getattr(config, "hidden_size", None)
        heads = getattr(config, "num_attention_heads", None)
    except RuntimeError:  # raised where it differs between layers (Gemma 4)
        return None
    if isinstance(given, int):
        return given
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) else None


def _computed_in(dtype: torch.dtype, device_type: str) -> torch.dtype:
    return dtype if dtype == torch.float64 else autocast_dtype(device_type) or dtype
