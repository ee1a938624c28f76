"""flash-attn's functions, for batches and for sequences packed into one row.

B batch, S sequence (Sq queries, Sk keys), T packed tokens (Tq queries, Tk keys), N sequences, H
query heads, K key/value heads, D head dimension.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from .arguments import Window
from .attend import Requested, Result, attend
from .forms import BATCH, HEADS_FIRST, KV_PACKED, QKV_PACKED, ROW, ROW_KV_PACKED, ROW_QKV_PACKED
from .masks import BlockMask, Mask
from .packing import Packing
from .paging import paged

Function = TypeVar("Function", bound=Callable[..., Any])


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Tensor | None = None,
    mask: Mask | BlockMask | None = None,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
) -> Result:
    """Compute exact attention without storing the score matrix (FlashAttention, arXiv
    2205.14135 and 2307.08691).

    out = softmax(softcap(q k^T * softmax_scale) - ALiBi + bias + mask) v, with dropout of the
    softmax. Arguments before the * have flash-attn 2.8's names, order, defaults and meaning; those
    after it are additions.

    Args:
        q: (B, Sq, H, D).
        k, v: (B, Sk, K, D). H is a multiple of K: query head h reads key head h // (H / K). D is 1
            to 512. Values, and with them out, may have fewer columns, Dv, as in multi-head latent
            attention. q, k and v have one dtype, float16, bfloat16 or float32 (on the CPU also
            float64), or are cast by torch.autocast. Any strides; a tensor is copied only where its
            last dimension is not contiguous.
        dropout_p: probability in [0, 1) of dropping an attention weight, rounded to a multiple of
            1/65536; the other weights are divided by 1 - dropout_p.
        softmax_scale: positive; default 1 / sqrt(D).
        causal: hide later keys, aligned bottom-right: query i stands at key position i + Sk - Sq
            and sees the keys up to there.
        window_size: (left, right), inclusive: a query at key position p sees the keys p - left to
            p + right; -1 or None: no bound. A tuple, a list or an integer tensor; reading a
            tensor waits for the GPU.
        softcap: replace scores by softcap * tanh(score / softcap); 0: none
            (Gemma 2, arXiv 2408.00118).
        alibi_slopes: (H,) or (B, H) float32: subtract slope * |distance| from the scores (ALiBi,
            arXiv 2108.12409). With a Mask the distances are between the mask's positions, and (N,
            H) has a row for each of its sequences.
        deterministic: make the backward bitwise reproducible, as
            torch.use_deterministic_algorithms(True) does. The portable kernels always are; the
            Hopper kernels always are with D > 128; with less they then add up dQ in a fixed order
            or, with a mask, leave the call to the portable ones.
        return_attn_probs: return (out, lse, S_dmask), for tests. S_dmask holds the
            attention weights (B, H, Sq, Sk) before dropout, negative where dropped; it is
            empty without dropout.
        bias: added to the scores; broadcasts to (B, H, Sq, Sk), in q's dtype or float32;
            differentiable; -inf hides a pair.
        mask: a Mask (flashtrain_kernels.masks), which replaces causal and window_size, or a
            BlockMask made with the same causal and window_size. Plan a Mask once a batch
            (`mask.planned(D, dtype)`), for all layers.
        dropout_seed: an integer, or an int64 tensor on q's device: (seed,) or (seed, first
            sequence, first head), the offsets where q is part of a larger batch. Default: drawn
            from torch's generator, which activation checkpointing restores. Whether a weight is
            dropped depends on the seed and its (sequence, head, query, key) alone.
        return_lse: also return the natural-log row log-sum-exp (B, H, Sq), float32 (float64 for
            float64), differentiable.
        learnable_sink: (H,), floating, differentiable: the score of one more key for
            each head, whose value is 0 (gpt-oss; named as in flash-attn 4). The
            log-sum-exp includes this score.

    Returns:
        out (B, Sq, H, D) in q's dtype, or (out, lse). A query that sees no key has output 0,
        log-sum-exp -inf (with a sink: the sink) and no gradient. Masked keys contribute nothing,
        even if they hold NaN.

    Raises:
        TypeError, ValueError: before anything runs; the message names the argument, its
            value and what is expected.
    """
    requested = Requested(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, bias,
        mask, dropout_seed, return_lse, learnable_sink,
    )  # fmt: skip
    return attend(BATCH, (q, k, v), requested)


def _with_options(function: Function) -> Function:
    """Decorator: a function of packed tensors shows the options of `flash_attn_func` as its own."""
    parameters = inspect.signature(flash_attn_func).parameters.values()
    options = [one for one in parameters if one.name in Requested._fields]
    own = inspect.signature(function)
    tensors = [one for one in own.parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    function.__signature__ = own.replace(parameters=[*tensors, *options])  # type: ignore[attr-defined]
    return function


def flash_attn_heads_first(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Result:
    """Compute `flash_attn_func` from q (B, H, Sq, D) and k, v (B, K, Sk, D), the layout of
    torch and transformers.

    This is faster than transposing q, k and v first.

    Args:
        arguments: the keyword arguments of `flash_attn_func`.

    Returns:
        What `flash_attn_func` returns, in its layout: out (B, Sq, H, D).

    Raises:
        TypeError: an unknown keyword; otherwise as `flash_attn_func`.
    """
    return attend(HEADS_FIRST, (q, k, v), Requested(**arguments))


@_with_options
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Result:
    """Compute `flash_attn_func` from q (B, Sq, H, D) and kv (B, Sk, 2, K, D), which stacks k and v,
    with its further arguments."""
    return attend(KV_PACKED, (q, kv), Requested(*options, **named))


@_with_options
def flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, **named: Any) -> Result:
    """Compute `flash_attn_func` from qkv (B, S, 3, H, D), which stacks q, k and v, as its gradient
    does, with its further arguments."""
    return attend(QKV_PACKED, (qkv,), Requested(*options, **named))


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    mask: Mask | None = None,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
) -> Result:
    """Compute `flash_attn_func` for N sequences packed into one row; a query sees the keys of
    its own sequence only.

    Dropout drops the same weights as for the unpacked sequences in a batch of N. Arguments that are
    not listed: see `flash_attn_func`.

    Args:
        q: (Tq, H, D).
        k, v: (Tk, K, D).
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int32 on q's device: 0, then where each sequence's
            queries and keys end. Tokens after the last end belong to no sequence: they see
            nothing and have output 0.
        max_seqlen_q, max_seqlen_k: upper bounds on a sequence's length, integers or tensors of one
            element. They only size S_dmask.
        causal, window_size: aligned bottom-right within each sequence.
        alibi_slopes: (H,) or (N, H).
        block_table: (N, pages) int32: k and v are then pages (number of pages, page size, K, D),
            and sequence n's keys fill the pages block_table[n] in order. The pages are gathered
            (copied) first; differentiable.
        bias: broadcasts to (1, H, Tq, Tk).
        mask: a Mask of the packed row, which replaces cu_seqlens, causal and window_size. Without
            it every layer makes that of its arguments: masks.varlen(...).planned(D, dtype), made
            once a batch, saves this. Most calls on Hopper GPUs need no mask (kernels/README.md).

    Returns:
        out (Tq, H, D); with return_lse (out, lse (H, Tq)); with return_attn_probs (out, lse,
        S_dmask), where S_dmask is empty without dropout, else (N, H, max_seqlen_q, max_seqlen_k).

    Raises:
        TypeError, ValueError: the message names the argument. The contents of cu_seqlens are
            checked on the CPU, and on a GPU once for each tensor (this waits for the GPU), but not
            under torch.compile or CUDA graph capture.
    """
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    requested = Requested(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, bias,
        mask, dropout_seed, return_lse, learnable_sink,
    )  # fmt: skip
    if block_table is not None:
        k, v, requested = paged(q, k, v, packing, block_table, requested)
    return attend(ROW, (q, k, v), requested, packing)


@_with_options
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    *options: Any,
    **named: Any,
) -> Result:
    """Compute `flash_attn_varlen_func` from q (Tq, H, D) and kv (Tk, 2, K, D), which stacks k and
    v, with its further arguments but for block_table."""
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return attend(ROW_KV_PACKED, (q, kv), Requested(*options, **named), packing)


@_with_options
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor, *options: Any, **named: Any
) -> Result:
    """Compute `flash_attn_varlen_func` from qkv (T, 3, H, D), which stacks q, k and v of the same
    sequences, with its further arguments but for block_table."""
    packing = Packing(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return attend(ROW_QKV_PACKED, (qkv,), Requested(*options, **named), packing)
