"""flashtrain's attention in Hugging Face transformers models.

    name = register_with_transformers()
    model = AutoModel.from_config(config, attn_implementation=name)        # or model.set_attn_implementation(name)

Models that take their attention from transformers' AttentionInterface are supported (GPT-2, BERT, Llama, Qwen,
ModernBERT, Gemma and most others; BLOOM, Falcon and others with attention of their own are refused), with padding on
either side, packed rows, sliding windows, grouped heads, soft caps, attention sinks, dropout, position biases and
caches in generation.

Causal models find packed documents in position_ids by themselves and put them into the mask. In other models the layers
receive the caller's cu_seq_lens_q and cu_seq_lens_k (transformers' names for flash-attn's cumulative lengths), or
position_ids, where the model passes them on (BERT and Llama do, ModernBERT does not).

Shapes: B batch, S sequence (Sq queries, Sk keys), N documents, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from flashtrain.errors import UserError
from flashtrain.integrations.huggingface_architectures import refuse_other_architectures
from flashtrain.integrations.huggingface_context import UNDER, holds_no_documents, inputs_of, share_sequences, whole_of
from flashtrain.integrations.huggingface_masks import AttentionMask, attention_mask, dense_bias
from flashtrain.models.sharded_sequence import ShardedSequence, sharded_sequence
from flashtrain_kernels.environment import autocast_dtype
from flashtrain_kernels.flash_attn import flash_attn_heads_first
from flashtrain_kernels.masks import (
    HIGH,
    LOW,
    POSITION,
    START,
    Documents,
    Mask,
    documents_from_cu_seqlens,
    documents_from_ids,
)
from flashtrain_kernels.masks.rows import ordinals

# transformers treats every name with "flash" in it as flash-attn or as a kernel of its hub, so it cannot be our name.
NAME = "exact_attention"

# The current batch's masks, by the tensor that each was made from, so that the layers of a model share one.
_MADE = WeakTensorKeyDictionary()
_latest: tuple[TensorWeakRef, Any, AttentionMask] | None = None  # source, key and mask of the latest without tensors
_OF_WHOLE = WeakTensorKeyDictionary()  # cu_seq_lens_q that were checked to describe all devices' tokens


def document_lengths(position_ids: Tensor) -> dict[str, Any]:
    """The arguments that separate the documents of packed rows in any model.

        model(input_ids, position_ids=position_ids, **document_lengths(position_ids))

    Bidirectional models that do not pass position_ids to their layers (ModernBERT) need them. Synchronizes the device.

    Args:
        position_ids: (B, S) integers that are 0 at the first token of each document.

    Returns:
        cu_seq_lens_q and cu_seq_lens_k (N + 1,) int32 over the flattened rows, max_length_q and max_length_k.
    """
    begins = position_ids == 0
    begins[:, 0] = True
    starts = begins.flatten().nonzero()[:, 0].to(torch.int32)
    bounds = torch.cat((starts, starts.new_full((1,), position_ids.numel())))
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def with_documents(requested: AttentionMask, query: Tensor, others: dict[str, Any]) -> AttentionMask:
    """A self-attention layer's mask restricted to the documents that the caller's arguments describe.

    query: Of the layer's head dimension and dtype. others: The layer's further arguments: cu_seq_lens_q with
    cu_seq_lens_k, else position_ids (not used with a padding mask). UserError: lengths with a cache.
    """
    if requested.settled:
        return requested
    lengths, positions = others.get("cu_seq_lens_q"), others.get("position_ids")
    if lengths is not None and others.get("cu_seq_lens_k") is not None:
        if requested.seqlen_q != requested.seqlen_k:
            raise UserError(
                f"cu_seq_lens_q and cu_seq_lens_k with {requested.seqlen_q} queries and {requested.seqlen_k} keys: "
                "expected as many keys as queries. Use them without a cache."
            )
        return _made_once(lengths, requested, query, _from_lengths)
    square = requested.seqlen_q == requested.seqlen_k > 1
    if not isinstance(positions, Tensor) or positions.dim() != 2 or not square:
        return requested
    if positions.shape[1] != requested.seqlen_q:
        return requested
    # Outside torch.compile a mask of intervals is one of padding, or contains the documents already.
    if requested.bias is not None or (requested.mask is not None and not torch.compiler.is_compiling()):
        return requested
    return _made_once(positions, requested, query, _from_positions)


def settled(given: Any, hidden: Tensor, others: dict[str, Any], *, head_dim: int) -> Any:
    """The mask of a causal model's layer with its documents included before torch.compile, which cannot search for
    them: every layer would make a document mask, whatever the positions.

    given: The layer's attention_mask; hidden: (B, S, E). Other masks, and those of sharded sequences, are unchanged.
    """
    if sharded_sequence() is not None or not isinstance(given, AttentionMask | None):
        return given
    query = hidden.new_empty(0, 0, 0, head_dim, dtype=autocast_dtype(hidden.device.type))
    batch, seqlen = hidden.shape[:2]
    requested = AttentionMask(batch, seqlen, seqlen, causal=True) if given is None else given
    return with_documents(requested, query, others)._replace(settled=True)


def _from_lengths(cu_seq_lens: Tensor, batch: int, seqlen: int) -> Documents:
    """Documents (B, S) from boundaries in the flattened rows."""
    found = documents_from_cu_seqlens(cu_seq_lens, batch * seqlen)
    row = torch.arange(batch, device=cu_seq_lens.device, dtype=torch.int32)[:, None] * seqlen
    return Documents(*((bound.view(batch, seqlen) - row).clamp(0, seqlen) for bound in found))


def _from_positions(position_ids: Tensor, batch: int, seqlen: int) -> Documents | None:
    """Documents (B, S) of the rows whose positions restart at 0; None when no row's do.

    A row whose positions jump to anything but 0, or jump at every token, is one document. Synchronizes the device
    unless transformers has searched the positions or made them. Under torch.compile documents are always made.
    """
    if not torch.compiler.is_compiling() and holds_no_documents(position_ids):
        return None
    breaks = torch.nn.functional.pad(position_ids[:, 1:] != position_ids[:, :-1] + 1, (1, 0))
    to_zero = ((position_ids == 0) | ~breaks).all(1) & (position_ids[:, 0] == 0)
    packed = to_zero & breaks.any(1) & ~breaks[:, 1:].all(1)
    if not torch.compiler.is_compiling() and not bool(packed.any()):
        return None
    return documents_from_ids((breaks & packed[:, None]).cumsum(1).expand(batch, seqlen))


def _made_once(
    source: Tensor, requested: AttentionMask, query: Tensor, find: Callable[[Tensor, int, int], Documents | None]
) -> AttentionMask:
    """`requested` within the documents that `find` makes of `source`, made once for all layers with the same mask."""

    def make() -> AttentionMask:
        documents = find(source, requested.batch, requested.seqlen_q)
        return requested if documents is None else _within(requested, documents, query)

    if torch.compiler.is_compiling():
        return make()
    global _latest
    mask_of = None if requested.mask is None else id(requested.mask.queries)
    bias_of = None if requested.bias is None else id(requested.bias)
    version = 0 if source.is_inference() else source._version  # inference tensors have no version
    key = version, *requested[:5], mask_of, bias_of, query.shape[3], query.dtype
    latest = _latest  # a look-up in _MADE takes as long as a short call
    if latest is not None and latest[1] == key and latest[0]() is source:
        return latest[2]
    made = _MADE.setdefault(source, {})
    known = made.get(key)
    if known is None:
        known = made[key] = (requested, make())  # `requested` too, so that the objects behind the key's ids stay alive
    if known[1].mask is None and known[1].bias is None:  # masks with tensors are freed with their source
        _latest = TensorWeakRef(source), key, known[1]
    return known[1]


def _within(requested: AttentionMask, documents: Documents, query: Tensor) -> AttentionMask:
    start, end = documents
    if requested.mask is None:
        index = torch.arange(requested.seqlen_q, device=start.device, dtype=torch.int32)[None]
        left, right = requested.window_size[0], 0 if requested.causal else requested.window_size[1]
        low = start if left < 0 else torch.maximum(start, index - left)
        high = end if right < 0 else torch.minimum(end, index + right + 1)
        position, begin, keys = index.expand_as(start), start, None
    else:
        rows, keys = requested.mask.queries, requested.mask.keys
        low, high = torch.maximum(rows[LOW], start), torch.minimum(rows[HIGH], end)
        position, begin = rows[POSITION], torch.maximum(rows[START], start)
    number = ordinals(documents.start).to(torch.int32)
    mask = Mask(torch.stack((low, high, position, begin, number)), keys, requested.seqlen_k)
    planned = mask.planned(query.shape[3], query.dtype) if sharded_sequence() is None else mask
    # Field by field: torch.compile (2.11) does not follow a slice of a tuple's subclass.
    return AttentionMask(requested.batch, requested.seqlen_q, requested.seqlen_k, mask=planned, bias=requested.bias)


def register_with_transformers(name: str = NAME) -> str:
    """Register our attention and its mask function with transformers under a name.

    Afterwards a model that does not call registered attention (BLOOM, Falcon, MPT) raises UserError when it is built
    for this name. Repeated calls are allowed, also with another name.

    Returns:
        The name, for attn_implementation.

    Raises:
        UserError: transformers is missing or too old, or uses the name itself ("eager", "sdpa", or one that contains
            "flash", "/", "|" or ":").
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise UserError(
            f"register_with_transformers needs the package transformers, version 5.20 or later ({error}): pip install "
            "'transformers>=5.20'."
        ) from error
    taken = {"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}
    others = name in taken and ALL_ATTENTION_FUNCTIONS.get(name) is not attention
    if others or any(part in name.lower() for part in ("flash", "/", "|", ":")):
        raise UserError(f"transformers uses the name {name!r} for another implementation. Use {NAME!r}.")
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, attention_mask)
    refuse_other_architectures(name)
    share_sequences()
    return name


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: AttentionMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers' layers call, computed by flash_attn_func's kernels.

    Under context parallelism (huggingface_context.py) query, key and value are this device's shards, and attention is
    to the whole sequence. flash_attn_func's errors pass through.

    Args:
        query, key, value: (B, H, Sq, D), (B, K, Sk, D) and (B, K, Sk, Dv). Differing dtypes (float32 rotary embeddings
            with bf16 values) all become value's, and under autocast float32 becomes autocast's.
        attention_mask: From our mask function; or the caller's own 4-D tensor, bool or to be added; or None.
        dropout: Probability.
        scaling: Of the scores (None: D**-0.5).
        is_causal: Used where attention_mask is None (None: the module's).
        softcap: As in Gemma 2.
        position_bias: (B or 1, H, Sq, Sk), added to the scores and differentiable, as in T5.
        s_aux: (H,) learnable sinks, one more score per query, whose value is zero, as in gpt-oss.
        others: cu_seq_lens_q and cu_seq_lens_k, or position_ids, describe packed documents.

    Returns:
        ((B, Sq, H, Dv), None).

    Raises:
        UserError: Arguments that these kernels do not support.
    """
    _refuse(others)
    spread = sharded_sequence()
    within = "Cross" not in type(module).__name__ and not getattr(module, "is_cross_attention", False)
    query, key, value = _one_dtype(query, key, value)
    width, head_dim = value.shape[3], query.shape[3]
    if width != head_dim:
        value = _as_wide(value, head_dim)
    batch, seqlen_q, seqlen_k = query.shape[0], query.shape[2], key.shape[2]
    if spread is not None:
        options = {"scale": scaling, "dropout": dropout, "softcap": softcap or 0.0, "sinks": s_aux}
        request = (attention_mask, is_causal, position_bias, others) if within else None
        transposed = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        sharded = _over_devices(spread, module, *transposed, request, options)
        if sharded is not None:
            return _narrow(sharded, width), None
    mask = _layer_mask(module, attention_mask, is_causal, (batch, seqlen_q, seqlen_k), query.dtype)
    if attention_mask is None and mask.causal and seqlen_k > seqlen_q:
        # As in sdpa: keys past the queries belong to a static cache and are not yet written.
        key, value, mask = key[:, :, :seqlen_q], value[:, :, :seqlen_q], mask._replace(seqlen_k=seqlen_q)
        position_bias = None if position_bias is None else position_bias[..., :seqlen_q]
    if within:
        mask = with_documents(mask, query, others)
    out = flash_attn_heads_first(
        query,
        key,
        value,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=mask.causal,
        window_size=mask.window_size,
        softcap=softcap or 0.0,
        bias=_bias(mask.bias, position_bias, query),
        mask=mask.mask,
        learnable_sink=s_aux,
    )
    return _narrow(cast(Tensor, out), width), None  # no log-sum-exp was requested


@torch.compiler.disable
def _over_devices(
    spread: ShardedSequence,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    request: tuple[AttentionMask | Tensor | None, bool | None, Tensor | None, dict[str, Any]] | None,
    options: dict[str, Any],
) -> Tensor | None:
    """Attention of this device's queries (B, n, H, D) to the whole sequence; None where it is to something else.

    request: The layer's attention_mask, is_causal, position_bias and further arguments (None: cross-attention).
    """
    shares = request is not None and query.shape[1] == key.shape[1] == spread.held and inputs_of(spread) is not None
    if request is None or not shares:
        spread.refuse_own_part(key.shape[1], f"transformers' {type(module).__name__}: attention")
        return None
    given, is_causal, position_bias, others = request
    if position_bias is not None or isinstance(given, Tensor):
        what = "position biases" if position_bias is not None else "a 4-D attention_mask"
        raise UserError(f"{what} {UNDER}: not supported. Use a model without, or another strategy (fsdp, ddp).")
    mask = _layer_mask(module, given, is_causal, (query.shape[0], spread.length, spread.length), query.dtype)
    positions, lengths = others.get("position_ids"), others.get("cu_seq_lens_q")
    whole = {**others, "position_ids": None}
    if isinstance(positions, Tensor) and positions.dim() == 2 and positions.shape[1] == spread.held:
        whole["position_ids"] = whole_of(spread, positions)
    if lengths is not None and lengths not in _OF_WHOLE and int(lengths[-1]) != mask.batch * mask.seqlen_k:
        raise UserError(
            f"cu_seq_lens_q end at {int(lengths[-1])} {UNDER}: expected {mask.batch * mask.seqlen_k}, the tokens of "
            "the whole batch. Put them into the batch, or make them of whole(batch, 'position_ids')."
        )
    if lengths is not None:
        _OF_WHOLE[lengths] = True
    mask = with_documents(mask, query, whole)
    if options["scale"] is None:
        options = {**options, "scale": query.shape[3] ** -0.5}
    return spread.attention(query, key, value, causal=mask.causal, mask=mask.mask, window=mask.window_size, **options)


def _layer_mask(
    module: nn.Module,
    given: AttentionMask | Tensor | None,
    is_causal: bool | None,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
) -> AttentionMask:
    if given is None:
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else bool(is_causal)
        return AttentionMask(*sizes, causal=causal and sizes[1] > 1)
    if isinstance(given, AttentionMask):
        if (given.seqlen_q, given.seqlen_k) != sizes[1:]:
            raise UserError(
                f"attention_mask has {given.seqlen_q} queries and {given.seqlen_k} keys, but this layer has {sizes[1]} "
                f"and {sizes[2]}. The model changes its mask: use attn_implementation='sdpa'."
            )
        return given
    if not isinstance(given, Tensor) or given.dim() != 4:
        what = f"of the shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"of type {type(given).__name__}"
        raise UserError(
            f"a layer got an attention_mask {what}: expected a tensor (B, H or 1, Sq, Sk). Pass a 2-D mask to the "
            "model, or use attn_implementation='sdpa'."
        )
    return AttentionMask(*sizes, bias=dense_bias(given, dtype)[..., : sizes[2]])


def _one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = value.dtype
    if dtype == torch.float32:
        dtype = autocast_dtype(query.device.type) or dtype
    if query.dtype == key.dtype == value.dtype == dtype:
        return query, key, value
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _as_wide(value: Tensor, head_dim: int) -> Tensor:
    """Values padded with zeros to the keys' head dimension (multi-head latent attention has narrower ones)."""
    if value.shape[3] > head_dim:
        raise UserError(f"value has head dimension {value.shape[3]}: expected at most key's, {head_dim}.")
    return nn.functional.pad(value, (0, head_dim - value.shape[3]))


def _narrow(out: Tensor, width: int) -> Tensor:
    """The first `width` of (B, Sq, H, D), contiguous; a view of all of it would cost autograd an extra step."""
    return (out if out.shape[3] == width else out[..., :width]).contiguous()


def _bias(mask_bias: Tensor | None, position_bias: Tensor | None, query: Tensor) -> Tensor | None:
    if mask_bias is None or position_bias is None:
        bias = mask_bias if position_bias is None else position_bias
    else:
        bias = mask_bias + position_bias
    return bias if bias is None or bias.dtype == torch.float32 else bias.to(query.dtype)


def _refuse(others: dict[str, Any]) -> None:
    if others.get("output_attentions"):
        raise UserError(
            "output_attentions=True needs the attention weights, which are never stored here. Use "
            "attn_implementation='eager'."
        )
    if others.get("cache") is not None:
        raise UserError("continuous batching (a paged cache) is not supported. Use attn_implementation='sdpa'.")
