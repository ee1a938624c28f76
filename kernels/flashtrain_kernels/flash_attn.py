"""flash-attn's functions, on batches and on sequences packed into one row, which a mask keeps apart.

B batch, S sequence (Sq queries, Sk keys), T packed tokens (Tq queries, Tk keys), N sequences, H query heads,
K key/value heads, D head dimension.
"""

from typing import Any

from torch import Tensor

from .arguments import Window
from .attend import Requested, Result, attend
from .forms import BATCH, HEADS_FIRST, KV_PACKED, QKV_PACKED, ROW, ROW_KV_PACKED, ROW_QKV_PACKED
from .masks import BlockMask, Mask
from .packing import Packing
from .paging import paged


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
    """Exact attention without the score matrix (FlashAttention, arXiv 2205.14135; FlashAttention-2, arXiv 2307.08691).

    softmax(softcap(q k^T * softmax_scale) - ALiBi + bias + mask) v, with dropout of the softmax. Names, order, defaults
    and meaning are flash-attn 2.8's; what follows the * is ours.

    Args:
        q: (B, Sq, H, D).
        k, v: (B, Sk, K, D) with H a multiple of K (query head h reads key head h // (H / K)), D from 1 to 256; float16,
            bfloat16 or float32 (on CPU tensors also float64), all three alike, as they are or as torch.autocast makes
            them. Any strides; only a last dimension that is not contiguous is copied.
        dropout_p: probability in [0, 1) of dropping an attention weight; the kept ones are divided by 1 - dropout_p,
            which is first rounded to a multiple of 1/65536.
        softmax_scale: positive; default 1 / sqrt(D).
        causal: aligned bottom-right: query i stands at key position i + Sk - Sq and sees the keys up to there.
        window_size: (left, right), inclusive: a query at key position p sees the keys p - left to p + right; -1: no
            bound. Any two integers: a tuple, a list, or a tensor (a GPU's is waited for); None, as flash-attn 4 has it,
            is -1.
        softcap: scores become softcap * tanh(score / softcap); 0: none (Gemma 2, arXiv 2408.00118).
        alibi_slopes: (H,) or (B, H) float32: slope * |p - j| is subtracted from the scores (ALiBi, arXiv 2108.12409).
            With a Mask the rows of (N, H) go by its sequences, and positions are the mask's.
        deterministic: the backward gives the same bits every time, as it does anyway but on the Hopper kernels, which
            then add dQ up in one order, or, with a mask or D beyond 128, are left for the others. It is also asked for
            by torch.use_deterministic_algorithms(True).
        return_attn_probs: return (out, lse, S_dmask) as flash-attn does, for tests: S_dmask is empty without dropout,
            else the attention weights (B, H, Sq, Sk) before dropout, negative where dropped; it stores the whole
            matrix.
        bias: broadcasts to (B, H, Sq, Sk), q's dtype or float32, added to the scores; has a gradient; -inf hides a
            pair.
        mask: a Mask (flashtrain_kernels.masks), with which causal and window_size stay at their defaults, or a
            BlockMask made with the same causal and window_size. Planned once (`mask.planned(D, dtype)`), it serves
            every layer.
        dropout_seed: an integer, or an int64 tensor on q's device of 1 element, or of 3: seed, and what is added to the
            numbers of sequences and heads, for a part of a batch. Default: drawn from torch's generator, so that
            recomputation under activation checkpointing repeats it. One weight's draw depends on the seed and its
            (sequence, head, query, key) alone.
        return_lse: also return the natural-log row log-sum-exp (B, H, Sq), float32 (float64 for float64),
            differentiable.
        learnable_sink: (H,), floating: one more score in each row of a head, whose value is nothing (gpt-oss; the name
            is flash-attn 4's). The log-sum-exp holds it too, so a query that sees no key has the sink's. Has a
            gradient.

    Returns:
        out (B, Sq, H, D) in q's dtype, or (out, lse). A query that sees no key gives output 0, log-sum-exp -inf and no
        gradient. Masked keys contribute nothing, whatever they hold.

    Raises:
        TypeError, ValueError: the message names the argument, what it was and what it may be, before anything runs.
    """
    requested = Requested(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, bias,
        mask, dropout_seed, return_lse, learnable_sink,
    )  # fmt: skip
    return attend(BATCH, (q, k, v), requested)


def flash_attn_heads_first(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Result:
    """`flash_attn_func` on q (B, H, Sq, D) and k, v (B, K, Sk, D), as torch and transformers have them.

    A short call is spared six views of tensors and of gradients.

    Args:
        arguments: flash_attn_func's, by name.

    Returns:
        what flash_attn_func returns, in its forms: out (B, Sq, H, D).

    Raises:
        TypeError: another name.
    """
    return attend(HEADS_FIRST, (q, k, v), Requested(**arguments))


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
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
    """`flash_attn_func` on q (B, Sq, H, D) and kv (B, Sk, 2, K, D); kv's gradient is one tensor, without copies."""
    requested = Requested(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, bias,
        mask, dropout_seed, return_lse, learnable_sink,
    )  # fmt: skip
    return attend(KV_PACKED, (q, kv), requested)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
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
    """`flash_attn_func` on qkv (B, S, 3, H, D), as one projection gives it; its gradient is one tensor too."""
    requested = Requested(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, bias,
        mask, dropout_seed, return_lse, learnable_sink,
    )  # fmt: skip
    return attend(QKV_PACKED, (qkv,), requested)


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
    """`flash_attn_func` on N sequences packed one after the other; a query sees keys of its own sequence only.

    Dropout draws for each weight what it would unpacked, with N sequences as the batch.

    Args:
        q: (Tq, H, D).
        k, v: (Tk, K, D).
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int32 on q's device: 0, then where each sequence's queries and keys end.
            Tokens past the last end belong to no sequence: they see nothing, and get output 0.
        max_seqlen_q, max_seqlen_k: the longest sequence's length, or more; an integer, or a tensor of one. Only the
            shape of S_dmask depends on them.
        causal, window_size: aligned bottom-right within each sequence.
        alibi_slopes: (H,) or (N, H).
        bias: broadcasts to (1, H, Tq, Tk).
        mask: a Mask of the packed row instead of the one that cu_seqlens, causal and window_size say, which must then
            stay at their defaults: masks.varlen(...).planned(D, dtype), made once a batch, saves each layer making its
            own. On Hopper GPUs, with D a multiple of 8 from 64 to 128 and without a bias, none is made at all, but for
            some calls with ALiBi or dropout (kernels/README.md).
        block_table: (N, pages) int32: k and v are pages (number of pages, page size, K, D) of any size, and a
            sequence's keys lie in its row's pages one after the other. They are gathered first, with a gradient.

    Returns:
        out (Tq, H, D), with return_lse (out, lse (H, Tq)), with return_attn_probs (out, lse, S_dmask) where S_dmask is
        empty without dropout, else (N, H, max_seqlen_q, max_seqlen_k).

    Raises:
        TypeError, ValueError: the message names the argument. The values of cu_seqlens are checked on a CPU; on a GPU,
            where that means waiting for it, once for each tensor, and not under torch.compile or CUDA graph capture.
    """
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    requested = Requested(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, bias,
        mask, dropout_seed, return_lse, learnable_sink,
    )  # fmt: skip
    if block_table is not None:
        k, v, requested = paged(q, k, v, packing, block_table, requested)
    return attend(ROW, (q, k, v), requested, packing)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
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
    *,
    bias: Tensor | None = None,
    mask: Mask | None = None,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
) -> Result:
    """`flash_attn_varlen_func` on q (Tq, H, D) and kv (Tk, 2, K, D); kv's gradient is one tensor, without copies."""
    requested = Requested(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, bias,
        mask, dropout_seed, return_lse, learnable_sink,
    )  # fmt: skip
    return attend(ROW_KV_PACKED, (q, kv), requested, Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
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
    mask: Mask | None = None,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
) -> Result:
    """`flash_attn_varlen_func` on qkv (T, 3, H, D), with one cu_seqlens; its gradient is one tensor, without copies."""
    requested = Requested(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, bias,
        mask, dropout_seed, return_lse, learnable_sink,
    )  # fmt: skip
    return attend(ROW_QKV_PACKED, (qkv,), requested, Packing(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen))
