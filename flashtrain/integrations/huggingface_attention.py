"""flashtrain's attention in Hugging Face transformers models.

    name = register_with_transformers()
    # or, of a model that is there: model.set_attn_implementation(name)
    model = AutoModel.from_config(config, attn_implementation=name)

Models that take their attention from transformers' AttentionInterface are supported (GPT-2,
BERT, Llama, Qwen, ModernBERT, Gemma and most others), with padding on either side, packed
rows, sliding windows, grouped heads, soft caps, attention sinks, dropout, position biases
and caches in generation.

Shapes: B batch, S sequence (Sq queries, Sk keys), n tokens of it on this device, H query heads, K
key/value heads, D head dimension.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from flashtrain.errors import UserError, needs_package
from flashtrain.integrations.huggingface_architectures import refuse_other_architectures
from flashtrain.integrations.huggingface_context import inputs_of, share_sequences, whole_of
from flashtrain.integrations.huggingface_documents import with_documents
from flashtrain.integrations.huggingface_masks import AttentionMask, attention_mask, dense_bias
from flashtrain.models.sharded_sequence import ShardedSequence, sharded_sequence
from flashtrain_kernels import flash_attn_with_kvcache
from flashtrain_kernels.arguments import autocasted
from flashtrain_kernels.flash_attn import flash_attn_heads_first

# transformers treats every name with "flash" in it as flash-attn or as a kernel of its hub, so
# it cannot be our name.
NAME = "exact_attention"

# cu_seq_lens_q that were checked to describe all devices' tokens.
_OF_WHOLE = WeakTensorKeyDictionary()

# How many keys each row's query sees (LayerCache.seen), while rows decode together.
SEEN: ContextVar[Tensor | None] = ContextVar("seen", default=None)


def register_with_transformers() -> str:
    """Register our attention and its mask function with transformers, as the
    attention implementation NAME.

    Afterwards a model with attention of its own (BLOOM, Falcon, MPT) raises UserError when it is
    built for this name. Repeated calls change nothing.

    Returns:
        The name, for attn_implementation.

    Raises:
        UserError: transformers is missing or too old.
    """
    with needs_package("register_with_transformers", "transformers", "hub"):
        from transformers import AttentionInterface, AttentionMaskInterface
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)
    refuse_other_architectures(NAME)
    share_sequences()
    return NAME


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
    """Compute the attention of a transformers layer by our kernels.

    Under context parallelism (huggingface_context.py) query, key and value are this device's
    shards, and attention is to the whole sequence. flash_attn_func's errors pass through.

    Args:
        module: The layer.
        query: (B, H, Sq, D). Where query, key and value differ in dtype (float32 rotary
            embeddings with bf16 values), they are cast to value's dtype; under autocast float32
            is cast to autocast's.
        key: (B, K, Sk, D).
        value: (B, K, Sk, Dv), Dv at most D.
        attention_mask: The result of our mask function; or a caller's 4-D tensor,
            bool or additive; or None.
        dropout: Probability of dropping an attention weight.
        scaling: Factor of the scores (None: D**-0.5).
        is_causal: Whether attention is causal, used where attention_mask is None
            (None: module.is_causal).
        softcap: Bound of the scores: softcap * tanh(score / softcap), as in
            Gemma 2 (None: no bound).
        position_bias: (B or 1, H, Sq, Sk), added to the scores and differentiable, as in T5.
        s_aux: (H,) learnable sinks, one more score per query, whose value is zero, as in gpt-oss.
        others: Further arguments of the layer; cu_seq_lens_q and cu_seq_lens_k, or position_ids,
            mark packed documents.

    Returns:
        (the output (B, Sq, H, Dv), None in place of attention weights).

    Raises:
        UserError: The kernels do not support an argument.
    """
    if others.get("output_attentions"):
        raise UserError(
            "output_attentions=True needs the attention weights, which are never stored here. Use "
            "attn_implementation='eager'."
        )
    sequence = sharded_sequence()
    within = "Cross" not in type(module).__name__ and not getattr(
        module, "is_cross_attention", False
    )
    query, key, value = autocasted(query.to(value.dtype), key.to(value.dtype), value)
    batch, seqlen_q, seqlen_k = query.shape[0], query.shape[2], key.shape[2]
    if sequence is not None:
        options = {"scale": scaling, "dropout": dropout, "softcap": softcap or 0.0, "sinks": s_aux}
        request = (attention_mask, is_causal, position_bias, others) if within else None
        # Multi-head latent attention has narrower values, which devices exchange as wide as keys.
        width, missing = value.shape[3], query.shape[3] - value.shape[3]
        wide = nn.functional.pad(value, (0, missing)) if missing else value
        transposed = query.transpose(1, 2), key.transpose(1, 2), wide.transpose(1, 2)
        sharded = _over_devices(sequence, module, *transposed, request, options)
        if sharded is not None:
            return _narrow(sharded, width), None
    mask = _layer_mask(module, attention_mask, is_causal, (batch, seqlen_q, seqlen_k), query.dtype)
    if attention_mask is None and mask.causal and seqlen_k > seqlen_q:
        # As in sdpa: keys past the queries belong to a static cache and are not yet written.
        key = key[:, :, :seqlen_q]
        value = value[:, :, :seqlen_q]
        mask = mask._replace(seqlen_k=seqlen_q)
        position_bias = None if position_bias is None else position_bias[..., :seqlen_q]
    if within:
        mask = with_documents(mask, query, others)
    how: Any = {"softmax_scale": scaling, "window_size": mask.window_size, "learnable_sink": s_aux}
    seen = None if torch.compiler.is_compiling() else SEEN.get()
    plain = mask.mask is mask.bias is position_bias is None
    # One row sees all keys, for which a CPU has something faster.
    if seen is not None and plain and (batch > 1 or query.is_cuda):
        q, k, v = (one.transpose(1, 2) for one in (query, key, value))
        how["cache_seqlens"] = seen.clamp(max=k.shape[1])
        found = flash_attn_with_kvcache(q, k, v, softcap=softcap or 0.0, **how)
        return cast(Tensor, found), None
    if seen is not None and batch > 1:
        raise UserError(f"{type(module).__name__} makes its own mask: generate after one prompt.")
    out = flash_attn_heads_first(
        query,
        key,
        value,
        dropout_p=dropout,
        causal=mask.causal,
        bias=_bias(mask.bias, position_bias, query),
        mask=mask.mask,
        softcap=softcap or 0.0,
        **how,
    )
    return cast(Tensor, out).contiguous(), None  # no log-sum-exp was requested


@torch.compiler.disable
def _over_devices(
    sequence: ShardedSequence,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    # The layer's attention_mask, is_causal, position_bias and further arguments
    # (None: cross-attention).
    request: tuple[AttentionMask | Tensor | None, bool | None, Tensor | None, dict[str, Any]]
    | None,
    options: dict[str, Any],
) -> Tensor | None:
    """Compute the attention of this device's queries (B, n, H, D) to the whole sequence; None if
    query and key are not shards of it, as in cross-attention."""
    own = query.shape[1] == key.shape[1] == sequence.held and inputs_of(sequence) is not None
    if request is None or not own:
        sequence.refuse_own_part(key.shape[1], f"transformers' {type(module).__name__}: attention")
        return None
    given, is_causal, position_bias, others = request
    if position_bias is not None or isinstance(given, Tensor):
        what = "support for a 4-D attention_mask"
        if position_bias is not None:
            what = "support for position biases"
        raise UserError(
            f"no {what} under context parallelism. "
            "Use a model without them, or another strategy (fsdp, ddp)."
        )
    mask = _layer_mask(
        module, given, is_causal, (query.shape[0], sequence.length, sequence.length), query.dtype
    )
    positions, lengths = others.get("position_ids"), others.get("cu_seq_lens_q")
    whole = {**others, "position_ids": None}
    if (
        isinstance(positions, Tensor)
        and positions.dim() == 2
        and positions.shape[1] == sequence.held
    ):
        whole["position_ids"] = whole_of(sequence, positions)
    if (
        lengths is not None
        and lengths not in _OF_WHOLE
        and int(lengths[-1]) != mask.batch * mask.seqlen_k
    ):
        raise UserError(
            f"cu_seq_lens_q end at {int(lengths[-1])} under context parallelism: expected "
            f"{mask.batch * mask.seqlen_k}, the tokens of the whole batch. Put cu_seq_lens_q "
            "into the batch, or compute it from "
            "flashtrain.models.sharded_sequence.whole(batch, 'position_ids')."
        )
    if lengths is not None:
        _OF_WHOLE[lengths] = True
    mask = with_documents(mask, query, whole)
    if options["scale"] is None:
        options = {**options, "scale": query.shape[3] ** -0.5}
    return sequence.attention(
        query, key, value, causal=mask.causal, mask=mask.mask, window=mask.window_size, **options
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
                f"attention_mask has {given.seqlen_q} queries and {given.seqlen_k} keys, but this "
                f"layer has {sizes[1]} and {sizes[2]}. The model changes its mask: use "
                "attn_implementation='sdpa'."
            )
        return given
    if not isinstance(given, Tensor) or given.dim() != 4:
        what = (
            f"of the shape {tuple(given.shape)}"
            if isinstance(given, Tensor)
            else f"of type {type(given).__name__}"
        )
        raise UserError(
            f"a layer got an attention_mask {what}: expected a tensor (B, H or 1, Sq, Sk). "
            "Pass a 2-D mask to the model, or use attn_implementation='sdpa'."
        )
    return AttentionMask(*sizes, bias=dense_bias(given, dtype)[..., : sizes[2]])


def _narrow(out: Tensor, width: int) -> Tensor:
    """Return the first `width` numbers of each head of `out` (B, Sq, H, D), contiguous; without a
    slice if that is all of D, since autograd would pay for it."""
    return (out if out.shape[3] == width else out[..., :width]).contiguous()


def _bias(mask_bias: Tensor | None, position_bias: Tensor | None, query: Tensor) -> Tensor | None:
    given = [one for one in (mask_bias, position_bias) if one is not None]
    bias = sum(given[1:], given[0]) if given else None
    return bias if bias is None or bias.dtype == torch.float32 else bias.to(query.dtype)
