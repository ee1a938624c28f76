"""flashtrain's attention in Hugging Face transformers models.

    name = register_with_transformers()
    model = AutoModel.from_config(config, attn_implementation=name)        # or model.set_attn_implementation(name)

Works for the models that take their attention from transformers' AttentionInterface (GPT-2, BERT, Llama, Qwen,
ModernBERT, Gemma and most others; BLOOM, Falcon and others with attention of their own are refused), with padding on
either side, packed rows, sliding windows, grouped heads, soft caps, attention sinks, dropout, position biases and
caches in generation.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.integrations.huggingface_architectures import refuse_other_architectures
from flashtrain.integrations.huggingface_documents import with_documents
from flashtrain.integrations.huggingface_masks import AttentionMask, attention_mask, dense_bias
from flashtrain.models.spread import spread_sequence
from flashtrain_kernels import flash_attn_func

# transformers treats every name with "flash" in it as flash-attn or as a kernel of its hub, so it cannot be our name.
NAME = "exact_attention"


def register_with_transformers(name: str = NAME) -> str:
    """Makes our attention known to transformers under a name, with its mask function; returns the name.

    May be called again, also with another name. UserError: transformers is not installed or too old, or a name that
    transformers gives a meaning of its own ("flash" or "/" or "|" in it, "eager", "sdpa" and the like). From then on a
    model that would not ask for this attention (BLOOM, Falcon, MPT) is refused by a UserError when given the name.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise UserError(
            f"register_with_transformers needs the package transformers, version 5 or later ({error}). "
            "Install it: pip install 'transformers>=5'."
        ) from error
    if not isinstance(name, str) or not name:
        raise UserError(f"name must be a word, not {name!r}. Possible: {NAME!r}.")
    for part in ("flash", "/", "|", ":"):
        if part in name.lower():
            raise UserError(
                f"name must not contain {part!r}, as {name!r} does: transformers would take it for another "
                f"implementation's. Possible: {NAME!r}."
            )
    taken = {"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}
    if name in taken and ALL_ATTENTION_FUNCTIONS.get(name) is not attention:
        raise UserError(f"name {name!r} is taken by another attention implementation. Possible: {NAME!r}.")
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, attention_mask)
    refuse_other_architectures(name)
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
    """What a layer of transformers calls: attention of one layer, by flash_attn_func.

    query: (B, H, Sq, D); key: (B, K, Sk, D); value: (B, K, Sk, Dv). Where their dtypes differ (float32 rotary
    embeddings beside bf16 values) all become value's, and under autocast float32 becomes autocast's dtype.
    attention_mask: from our mask function; None; or the caller's own 4-D tensor, bool or to be added.
    dropout: probability. scaling: of the scores, default D**-0.5. is_causal: for attention_mask None, default the
    module's. softcap: as in Gemma 2. position_bias: (B or 1, H, Sq, Sk), added to the scores, with its gradient, as in
    T5. s_aux: (H,) learnable sinks, one more score a row whose value is nothing, as in gpt-oss.
    Of the others cu_seq_lens_q and cu_seq_lens_k, and position_ids, say where packed documents begin.
    Returns ((B, Sq, H, Dv), None). UserError for what cannot be expressed, and, under context parallelism, for a
    device's own part of a sequence; flash_attn_func's errors pass through.
    """
    _refuse(others)
    spread = spread_sequence()
    if spread is not None:  # not shared yet: transformers' layers come with masks of this device's tokens alone
        spread.refuse_own_part(key.shape[2], f"transformers' {type(module).__name__}: attention")
    query, key, value = (x.transpose(1, 2) for x in _one_dtype(query, key, value))
    width, value = value.shape[3], _as_wide(value, query.shape[3])
    batch, seqlen_q = query.shape[:2]
    asked = _layer_mask(module, attention_mask, is_causal, query, key)
    if attention_mask is None and asked.causal and asked.seqlen_k > seqlen_q:
        # As sdpa does: keys past the queries are a static cache's, not yet written.
        key, value, asked = key[:, :seqlen_q], value[:, :seqlen_q], asked._replace(seqlen_k=seqlen_q)
        position_bias = None if position_bias is None else position_bias[..., :seqlen_q]
    if "Cross" not in type(module).__name__ and not getattr(module, "is_cross_attention", False):
        asked = with_documents(asked, query, others)
    result = flash_attn_func(
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
        return_lse=s_aux is not None,
    )
    if s_aux is None:
        out = cast(Tensor, result)
    else:
        out = _with_sinks(*cast(tuple[Tensor, Tensor], result), s_aux)
    return out[..., :width].reshape(batch, seqlen_q, -1, width).contiguous(), None


def _layer_mask(
    module: nn.Module, given: AttentionMask | Tensor | None, is_causal: bool | None, query: Tensor, key: Tensor
) -> AttentionMask:
    sizes = (query.shape[0], query.shape[1], key.shape[1])
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
    return AttentionMask(*sizes, bias=dense_bias(given, query.dtype)[..., : sizes[2]])


def _one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype, device_type = value.dtype, query.device.type
    if dtype == torch.float32 and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _as_wide(value: Tensor, head_dim: int) -> Tensor:
    """Values padded with zeros to the head dimension of the keys (multi-head latent attention has narrower ones)."""
    if value.shape[3] > head_dim:
        raise UserError(f"value's head dimension must be at most key's, {head_dim}, not {value.shape[3]}.")
    return nn.functional.pad(value, (0, head_dim - value.shape[3])) if value.shape[3] < head_dim else value


def _bias(mask_bias: Tensor | None, position_bias: Tensor | None, query: Tensor) -> Tensor | None:
    if mask_bias is None or position_bias is None:
        bias = mask_bias if position_bias is None else position_bias
    else:
        bias = mask_bias + position_bias
    return bias if bias is None or bias.dtype == torch.float32 else bias.to(query.dtype)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention with one more score a row, `sinks` (H,), whose value is 0: the others' share of the softmax shrinks.

    out: (B, Sq, H, D); lse: (B, H, Sq). share = exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink).
    """
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[None, :, None])
    return out * share.transpose(1, 2)[..., None].to(out.dtype)


def _refuse(others: dict[str, Any]) -> None:
    if others.get("output_attentions"):
        raise UserError(
            "output_attentions=True needs the attention weights, which are never stored here. Possible: "
            "attn_implementation='eager'."
        )
    if others.get("cache") is not None:
        raise UserError("continuous batching (a paged cache) is not supported. Possible: attn_implementation='sdpa'.")
