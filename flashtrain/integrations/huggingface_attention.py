"""flashtrain's attention in Hugging Face transformers models.

    name = register_with_transformers()
    model = AutoModel.from_config(config, attn_implementation=name)        # or model.set_attn_implementation(name)

Works for the models that take their attention from transformers' AttentionInterface (GPT-2, BERT, Llama, Qwen,
ModernBERT, Gemma and most others; BLOOM, Falcon and others with attention of their own are refused), with padding on
either side, packed rows, sliding windows, grouped heads, soft caps, attention sinks, dropout, position biases and
caches in generation.

Causal models of transformers find packed documents from position_ids themselves and put them into the mask. For others
the layers get what the caller gave the model: cu_seq_lens_q and cu_seq_lens_k (transformers' names for flash-attn's
cumulative lengths), or position_ids, where the model passes them on (BERT and Llama do, ModernBERT does not).

B batch, S sequence (Sq queries, Sk keys), N documents, H query heads, K key/value heads, D head dim.
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
from flashtrain.models.cache import SpreadSequence, spread_sequence
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
from flashtrain_kernels.masks.constructors import ordinals

# The masks of the batch at hand, by the tensor they were made from, so that the layers of a model share one.
_MADE = WeakTensorKeyDictionary()
_latest: tuple[TensorWeakRef, Any, AttentionMask] | None = None  # of those without tensors: source, key, mask
_OF_WHOLE = WeakTensorKeyDictionary()  # cu_seq_lens_q that were seen to be of all devices' tokens


def document_lengths(position_ids: Tensor) -> dict[str, Any]:
    """The arguments with which a model keeps the documents of packed rows apart, whatever model it is:

        model(input_ids, position_ids=position_ids, **document_lengths(position_ids))

    position_ids: (B, S) integers that are 0 at the first token of each document.
    Returns cu_seq_lens_q and cu_seq_lens_k (N + 1,) int32, over the rows one after the other, and max_length_q and
    max_length_k. Needed for models that see both ways and do not pass position_ids to their layers (ModernBERT).
    Waits for the device.
    """
    begins = position_ids == 0
    begins[:, 0] = True
    starts = begins.flatten().nonzero()[:, 0].to(torch.int32)
    bounds = torch.cat((starts, starts.new_full((1,), position_ids.numel())))
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def with_documents(asked: AttentionMask, query: Tensor, others: dict[str, Any]) -> AttentionMask:
    """The mask of a layer that sees itself, with the documents in it that the caller's arguments tell of.

    query: of the layer's head dimension and dtype. others: the layer's further arguments: cu_seq_lens_q with
    cu_seq_lens_k, else position_ids (used where the mask is none of padding). UserError: lengths with a cache, whose
    keys they say nothing of.
    """
    if asked.settled:
        return asked
    lengths, positions = others.get("cu_seq_lens_q"), others.get("position_ids")
    if lengths is not None and others.get("cu_seq_lens_k") is not None:
        if asked.seqlen_q != asked.seqlen_k:
            raise UserError(
                f"cu_seq_lens_q and cu_seq_lens_k need as many keys as queries, not {asked.seqlen_k} and "
                f"{asked.seqlen_q}: give them without a cache."
            )
        return _made_once(lengths, asked, query, _from_lengths)
    square = asked.seqlen_q == asked.seqlen_k > 1
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != asked.seqlen_q or not square:
        return asked
    # Outside torch.compile a mask of intervals is of padding, or holds the documents already.
    if asked.bias is not None or (asked.mask is not None and not torch.compiler.is_compiling()):
        return asked
    return _made_once(positions, asked, query, _from_positions)


def settled(given: Any, hidden: Tensor, others: dict[str, Any], *, head_dim: int) -> Any:
    """The mask of a causal model's layer with its documents in it, before torch.compile, which cannot look for them: it
    would have every layer make a mask of documents, whatever the positions.

    given: the layer's attention_mask; hidden: (B, S, E). A mask of another kind stays what it is, as does one of tokens
    that devices share.
    """
    if spread_sequence() is not None or not isinstance(given, AttentionMask | None):
        return given
    query = hidden.new_empty(0, 0, 0, head_dim, dtype=autocast_dtype(hidden.device.type))
    asked = AttentionMask(hidden.shape[0], hidden.shape[1], hidden.shape[1], causal=True) if given is None else given
    return with_documents(asked, query, others)._replace(settled=True)


def _from_lengths(cu_seq_lens: Tensor, batch: int, seqlen: int) -> Documents:
    """Documents (B, S) from boundaries within the rows one after the other."""
    found = documents_from_cu_seqlens(cu_seq_lens, batch * seqlen)
    row = torch.arange(batch, device=cu_seq_lens.device, dtype=torch.int32)[:, None] * seqlen
    return Documents(*((bound.view(batch, seqlen) - row).clamp(0, seqlen) for bound in found))


def _from_positions(position_ids: Tensor, batch: int, seqlen: int) -> Documents | None:
    """Documents (B, S) of the rows whose positions restart at 0; None when no row is such a one.

    Positions that break off to anything but 0, or at every token, are not those of packed documents: such a row is one
    document. Waits for the device, unless transformers looked already or made the positions, and except under
    torch.compile, where documents are made whatever the positions are.
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
    source: Tensor, asked: AttentionMask, query: Tensor, find: Callable[[Tensor, int, int], Documents | None]
) -> AttentionMask:
    """`asked` within the documents that `find` makes of `source`; made once for all layers that ask the same."""

    def make() -> AttentionMask:
        documents = find(source, asked.batch, asked.seqlen_q)
        return asked if documents is None else _within(asked, documents, query)

    if torch.compiler.is_compiling():
        return make()
    global _latest
    mask_of = None if asked.mask is None else id(asked.mask.queries)
    bias_of = None if asked.bias is None else id(asked.bias)
    version = 0 if source.is_inference() else source._version  # inference tensors count none
    key = version, *asked[:5], mask_of, bias_of, query.shape[3], query.dtype
    latest = _latest  # looking into _MADE takes a short call's time
    if latest is not None and latest[1] == key and latest[0]() is source:
        return latest[2]
    made = _MADE.setdefault(source, {})
    known = made.get(key)
    if known is None:
        known = made[key] = (asked, make())  # `asked` too, so that what the key names by id stays
    if known[1].mask is None and known[1].bias is None:  # what holds tensors goes with its source
        _latest = TensorWeakRef(source), key, known[1]
    return known[1]


def _within(asked: AttentionMask, documents: Documents, query: Tensor) -> AttentionMask:
    start, end = documents
    if asked.mask is None:
        index = torch.arange(asked.seqlen_q, device=start.device, dtype=torch.int32)[None]
        left, right = asked.window_size[0], 0 if asked.causal else asked.window_size[1]
        low = start if left < 0 else torch.maximum(start, index - left)
        high = end if right < 0 else torch.minimum(end, index + right + 1)
        position, begin, keys = index.expand_as(start), start, None
    else:
        rows, keys = asked.mask.queries, asked.mask.keys
        low, high = torch.maximum(rows[LOW], start), torch.minimum(rows[HIGH], end)
        position, begin = rows[POSITION], torch.maximum(rows[START], start)
    number = ordinals(documents).to(torch.int32)
    mask = Mask(torch.stack((low, high, position, begin, number)), keys, asked.seqlen_k)
    planned = mask.planned(query.shape[3], query.dtype) if spread_sequence() is None else mask
    # Field by field: torch.compile (2.11) does not follow a slice of a tuple's subclass.
    return AttentionMask(asked.batch, asked.seqlen_q, asked.seqlen_k, mask=planned, bias=asked.bias)


# transformers treats every name with "flash" in it as flash-attn or as a kernel of its hub, so it cannot be our name.
NAME = "exact_attention"


def register_with_transformers(name: str = NAME) -> str:
    """Makes our attention known to transformers under a name, with its mask function; returns the name.

    May be called again, also with another name. UserError: transformers is not installed or too old, or a name that
    transformers gives a meaning of its own ("flash" or "/" or "|" in it, "eager", "sdpa" and the like). From then on a
    model that does not call this attention (BLOOM, Falcon, MPT) is refused by a UserError when built for the name.
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
        raise UserError(f"transformers takes the name {name!r} for another implementation's: expected {NAME!r}.")
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
    """What a layer of transformers calls: attention of one layer, by flash_attn_func's kernels.

    query: (B, H, Sq, D); key: (B, K, Sk, D); value: (B, K, Sk, Dv). Where their dtypes differ (float32 rotary
    embeddings beside bf16 values) all become value's, and under autocast float32 becomes autocast's dtype.
    attention_mask: from our mask function; None; or the caller's own 4-D tensor, bool or to be added.
    dropout: probability. scaling: of the scores, default D**-0.5. is_causal: for attention_mask None, default the
    module's. softcap: as in Gemma 2. position_bias: (B or 1, H, Sq, Sk), added to the scores, with its gradient, as in
    T5. s_aux: (H,) learnable sinks, one more score a row whose value is nothing, as in gpt-oss.
    Of the others cu_seq_lens_q and cu_seq_lens_k, and position_ids, say where packed documents begin.
    Where devices share a sequence (huggingface_context.py), these are one's part of it, and attention is to all of it.
    Returns ((B, Sq, H, Dv), None). UserError for what cannot be expressed; flash_attn_func's errors pass through.
    """
    _refuse(others)
    spread = spread_sequence()
    within = "Cross" not in type(module).__name__ and not getattr(module, "is_cross_attention", False)
    query, key, value = _one_dtype(query, key, value)
    width, head_dim = value.shape[3], query.shape[3]
    if width != head_dim:
        value = _as_wide(value, head_dim)
    batch, seqlen_q, seqlen_k = query.shape[0], query.shape[2], key.shape[2]
    if spread is not None:
        options = {"scale": scaling, "dropout": dropout, "softcap": softcap or 0.0, "sinks": s_aux}
        asking = (attention_mask, is_causal, position_bias, others) if within else None
        turned = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        shared = _over_devices(spread, module, *turned, asking, options)
        if shared is not None:
            return _narrow(shared, width), None
    asked = _layer_mask(module, attention_mask, is_causal, (batch, seqlen_q, seqlen_k), query.dtype)
    if attention_mask is None and asked.causal and seqlen_k > seqlen_q:
        # As sdpa does: keys past the queries are a static cache's, not yet written.
        key, value, asked = key[:, :, :seqlen_q], value[:, :, :seqlen_q], asked._replace(seqlen_k=seqlen_q)
        position_bias = None if position_bias is None else position_bias[..., :seqlen_q]
    if within:
        asked = with_documents(asked, query, others)
    out = flash_attn_heads_first(
        query,
        key,
        value,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=asked.causal,
        window_size=asked.window_size,
        softcap=softcap or 0.0,
        bias=_bias(asked.bias, position_bias, query),
        mask=asked.mask,
        learnable_sink=s_aux,
    )
    return _narrow(cast(Tensor, out), width), None  # without a log-sum-exp beside it


@torch.compiler.disable
def _over_devices(
    spread: SpreadSequence,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    asking: tuple[AttentionMask | Tensor | None, bool | None, Tensor | None, dict[str, Any]] | None,
    options: dict[str, Any],
) -> Tensor | None:
    """Attention of this device's queries (B, n, H, D) to all of the sequence; None where it is to something else.

    asking: a layer's attention_mask, is_causal, position_bias and further arguments; None: it looks at another text.
    """
    shares = asking is not None and query.shape[1] == key.shape[1] == spread.held and inputs_of(spread) is not None
    if asking is None or not shares:
        spread.refuse_own_part(key.shape[1], f"transformers' {type(module).__name__}: attention")
        return None
    given, is_causal, position_bias, others = asking
    if position_bias is not None or isinstance(given, Tensor):
        what = "position biases" if position_bias is not None else "a 4-D attention_mask"
        raise UserError(f"{what} {UNDER}. Possible: a model without, or another strategy (fsdp, ddp).")
    asked = _layer_mask(module, given, is_causal, (query.shape[0], spread.length, spread.length), query.dtype)
    positions, lengths = others.get("position_ids"), others.get("cu_seq_lens_q")
    whole = {**others, "position_ids": None}
    if isinstance(positions, Tensor) and positions.dim() == 2 and positions.shape[1] == spread.held:
        whole["position_ids"] = whole_of(spread, positions)
    if lengths is not None and lengths not in _OF_WHOLE and int(lengths[-1]) != asked.batch * asked.seqlen_k:
        raise UserError(
            f"cu_seq_lens_q that end at {int(lengths[-1])} {UNDER}, for {asked.batch * asked.seqlen_k} tokens. "
            "Possible: those of the whole batch (in it, or of whole(batch, 'position_ids'))."
        )
    if lengths is not None:
        _OF_WHOLE[lengths] = True
    asked = with_documents(asked, query, whole)
    if options["scale"] is None:
        options = {**options, "scale": query.shape[3] ** -0.5}
    return spread.attention(
        query, key, value, causal=asked.causal, mask=asked.mask, window=asked.window_size, **options
    )


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
                f"attention_mask is for {given.seqlen_q} queries and {given.seqlen_k} keys, but this layer has "
                f"{sizes[1]} and {sizes[2]}: the model changes its mask in a way that needs attn_implementation='sdpa'."
            )
        return given
    if not isinstance(given, Tensor) or given.dim() != 4:
        what = f"of the shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise UserError(
            f"attention_mask must reach a layer as a tensor (B, H or 1, Sq, Sk), not {what}. Possible: a 2-D mask "
            "given to the model, or attn_implementation='sdpa'."
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
        raise UserError(f"value's head dimension must be at most key's, {head_dim}, not {value.shape[3]}.")
    return nn.functional.pad(value, (0, head_dim - value.shape[3]))


def _narrow(out: Tensor, width: int) -> Tensor:
    """The first `width` of (B, Sq, H, D), contiguous. A view of all of it would cost autograd a step of its own."""
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
            "output_attentions=True needs the attention weights, which are never stored here. Possible: "
            "attn_implementation='eager'."
        )
    if others.get("cache") is not None:
        raise UserError("continuous batching (a paged cache) is not supported. Possible: attn_implementation='sdpa'.")
