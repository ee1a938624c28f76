"""flash-attn's functions on batches: check the arguments, say plainly what is wrong, run the call.

B batch, S sequence (Sq queries, Sk keys), H query heads, K key/value heads, D head dimension.
"""

from typing import Any

from torch import Tensor

from .arguments import Sizes, check_packed, check_q_and_kv, check_qkv
from .calls import Given, Result, attend, attend_kvpacked, attend_qkvpacked, options_of, returned, with_lse
from .dispatch import explained
from .masks import BlockMask, Mask
from .options import Options

_Q, _K = "(B, Sq, H, D)", "(B, Sk, K, D)"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Tensor | None = None,
    mask: Mask | BlockMask | None = None,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """Exact attention without the score matrix (FlashAttention, arXiv 2205.14135; FlashAttention-2, arXiv 2307.08691).

    softmax(softcap(q k^T * softmax_scale) - ALiBi + bias + mask) v, with dropout of the softmax. Names, order, defaults
    and meaning are flash-attn 2.8's; what follows the * is ours.

    q: (B, Sq, H, D); k, v: (B, Sk, K, D) with H a multiple of K (query head h reads key head h // (H / K)), D from 1
        to 256; float16, bfloat16 or float32 (on CPU tensors also float64), all three alike. Any strides; only a last
        dimension that is not contiguous is copied.
    dropout_p: probability in [0, 1) of dropping an attention weight; the kept ones are divided by 1 - dropout_p.
    softmax_scale: positive; default 1 / sqrt(D).
    causal: aligned bottom-right: query i stands at key position i + Sk - Sq and sees the keys up to there.
    window_size: (left, right), inclusive: a query at key position p sees the keys p - left to p + right; -1: no bound.
    softcap: scores become softcap * tanh(score / softcap); 0: none (Gemma 2, arXiv 2408.00118).
    alibi_slopes: (H,) or (B, H) float32: slope * |p - j| is subtracted from the scores (ALiBi, arXiv 2108.12409). With
        a Mask the rows of (N, H) go by its sequences, and positions are the mask's.
    deterministic: the backward gives the same bits every time, as it does anyway but on the Hopper kernels, which are
        left for the others then, except in short calls of many heads of 64. It is also asked for by
        torch.use_deterministic_algorithms(True).
    return_attn_probs: return (out, lse, S_dmask) as flash-attn does, for tests: S_dmask is empty without dropout, else
        the attention weights (B, H, Sq, Sk) before dropout, negative where dropped; it stores the whole matrix.
    bias: broadcasts to (B, H, Sq, Sk), q's dtype or float32, added to the scores; has a gradient; -inf hides a pair.
    mask: a Mask (flashtrain_kernels.masks), with which causal and window_size stay at their defaults, or a BlockMask
        made with the same causal and window_size. Planned once (`mask.planned(D, dtype)`), it serves every layer.
    dropout_seed: an integer, or an int64 tensor on q's device of 1 element, or of 3: seed, and what is added to the
        numbers of sequences and heads, for a part of a batch. Default: drawn from torch's generator, so that
        recomputation under activation checkpointing repeats it. One weight's draw depends on the seed and its
        (sequence, head, query, key) alone.
    return_lse: also return the natural-log row log-sum-exp (B, H, Sq), float32 (float64 for float64), differentiable.

    Returns out (B, Sq, H, D) in q's dtype, or (out, lse). A query that sees no key gives output 0, log-sum-exp -inf
    and no gradient. Masked keys contribute nothing, whatever they hold.
    Raises TypeError or ValueError that names the argument, what it was and what it may be, before anything runs.
    """
    given = Given(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, bias,
        mask, dropout_seed, return_lse,
    )  # fmt: skip
    check_qkv(q, k, v, _Q, _K)
    options = options_of(given, _sizes(q, k))
    out, lse = attend(q, k, v, options, with_lse(given))
    return returned(given, options, out, lse, q, k)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Tensor | None = None,
    mask: Mask | BlockMask | None = None,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """`flash_attn_func` on q (B, Sq, H, D) and kv (B, Sk, 2, K, D); kv's gradient is one tensor, without copies."""
    given = Given(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, bias,
        mask, dropout_seed, return_lse,
    )  # fmt: skip
    check_q_and_kv(q, kv, _Q, "(B, Sk, 2, K, D)")
    options = options_of(given, _sizes(q, kv))
    out, lse = attend_kvpacked(q, kv, options, with_lse(given))
    return returned(given, options, out, lse, q, kv.select(2, 0))


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Tensor | None = None,
    mask: Mask | BlockMask | None = None,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """`flash_attn_func` on qkv (B, S, 3, H, D), as one projection gives it; its gradient is one tensor too."""
    given = Given(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, bias,
        mask, dropout_seed, return_lse,
    )  # fmt: skip
    check_packed(qkv, "(B, S, 3, H, D)")
    options = options_of(given, _sizes(qkv, qkv))
    out, lse = attend_qkvpacked(qkv, options, with_lse(given))
    return returned(given, options, out, lse, qkv.select(2, 0), qkv.select(2, 1))


def explain(q: Tensor, k: Tensor, v: Tensor, *positional: Any, **options: Any) -> str:
    """One line: which implementation and which tiles `flash_attn_func` gets with these arguments, and why.

    Raises what the call itself would raise.
    """
    given = Given(*positional, **options)
    check_qkv(q, k, v, _Q, _K)
    # A fixed seed, so that explaining draws nothing from torch's generator.
    seed = 0 if given.dropout_seed is None else given.dropout_seed
    call = options_of(given._replace(dropout_seed=seed), _sizes(q, k))
    return explained(q, k, v, call, _in_words(given, call))


def _in_words(given: Given, options: Options) -> str:
    mask = options.mask
    if isinstance(mask, Mask):
        intervals = "one interval" if mask.queries.shape[0] == 5 else "two intervals"
        order = "" if mask.keys is None else " and keys in an order of their own"
        words = [f"mask with {intervals} a query{order}"]
    elif mask is not None:
        words = [f"block mask of {mask.block_size[0]}x{mask.block_size[1]} blocks"]
    else:
        words = []
    asked = {
        "causal": given.causal,
        f"window {tuple(given.window_size)}": tuple(given.window_size) != (-1, -1),
        "softcap": options.softcap > 0,
        "ALiBi": options.alibi_slopes is not None,
        "bias": options.bias is not None,
        "dropout": options.dropout_p > 0,
    }
    return ", ".join(words + [name for name, true in asked.items() if true]) or "full attention"


def _sizes(q: Tensor, k: Tensor) -> Sizes:
    return Sizes(
        batch=q.shape[0],
        seqlen_q=q.shape[1],
        seqlen_k=k.shape[1],
        heads=q.shape[-2],
        kv_heads=k.shape[-2],
        head_dim=q.shape[-1],
        sequences=q.shape[0],
        dtype=q.dtype,
        device=q.device,
    )
