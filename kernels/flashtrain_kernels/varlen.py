"""flash-attn's functions on sequences packed into one row of tokens, which a mask keeps apart.

T packed tokens (Tq queries, Tk keys), N sequences, H query heads, K key/value heads, D head dimension.
"""

from torch import Tensor

from .arguments import Sizes, check_packed, check_q_and_kv, check_qkv
from .calls import Given, Packing, Result, attend, attend_kvpacked, attend_qkvpacked, options_of, returned, with_lse
from .feature_arguments import check_cu_seqlens
from .masks import Mask

_Q = "(Tq, H, D)"


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
    *,
    bias: Tensor | None = None,
    mask: Mask | None = None,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """`flash_attn_func` on N sequences packed one after the other; a query sees keys of its own sequence only.

    q: (Tq, H, D); k, v: (Tk, K, D).
    cu_seqlens_q, cu_seqlens_k: (N + 1,) int32 on q's device: 0, then where each sequence's queries and keys end. Tokens
        past the last end belong to no sequence: they see nothing, and get output 0.
    max_seqlen_q, max_seqlen_k: the longest sequence's length, or more. Only the shape of S_dmask depends on them.
    causal, window_size: aligned bottom-right within each sequence. alibi_slopes: (H,) or (N, H).
    bias: broadcasts to (1, H, Tq, Tk).
    mask: a Mask of the packed row instead of the one that cu_seqlens, causal and window_size say, which must then stay
        at their defaults: masks.varlen(...).planned(D, dtype), made once a batch, saves each layer making its own.
    block_table: only None: a paged key/value cache is not supported.
    Dropout draws for each weight what it would unpacked, with N sequences as the batch.

    Returns out (Tq, H, D), with return_lse (out, lse (H, Tq)), with return_attn_probs (out, lse, S_dmask) where S_dmask
    is empty without dropout, else (N, H, max_seqlen_q, max_seqlen_k).
    Raises TypeError or ValueError that names the argument. The values of cu_seqlens are checked on a CPU; on a GPU,
    where that means waiting for it, once for each tensor, and not under torch.compile or CUDA graph capture.
    """
    given = Given(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, bias,
        mask, dropout_seed, return_lse,
    )  # fmt: skip
    check_qkv(q, k, v, _Q, "(Tk, K, D)")
    if block_table is not None:
        raise ValueError(f"block_table must be None (paged caches are not supported), not {type(block_table).__name__}")
    packing = _checked(Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), q, k)
    options = options_of(given, _sizes(q, k, packing), packing)
    out, lse = attend(q[None], k[None], v[None], options, with_lse(given))
    return returned(given, options, out[0], lse, q[None], k[None], packing)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
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
    mask: Mask | None = None,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """`flash_attn_varlen_func` on q (Tq, H, D) and kv (Tk, 2, K, D); kv's gradient is one tensor, without copies."""
    given = Given(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, bias,
        mask, dropout_seed, return_lse,
    )  # fmt: skip
    check_q_and_kv(q, kv, _Q, "(Tk, 2, K, D)")
    packing = _checked(Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), q, kv)
    options = options_of(given, _sizes(q, kv, packing), packing)
    out, lse = attend_kvpacked(q[None], kv[None], options, with_lse(given))
    return returned(given, options, out[0], lse, q[None], kv[None].select(2, 0), packing)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
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
    mask: Mask | None = None,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """`flash_attn_varlen_func` on qkv (T, 3, H, D), with one cu_seqlens; its gradient is one tensor, without copies."""
    given = Given(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, bias,
        mask, dropout_seed, return_lse,
    )  # fmt: skip
    check_packed(qkv, "(T, 3, H, D)")
    check_cu_seqlens("cu_seqlens", cu_seqlens, qkv.shape[0], qkv.device, "max_seqlen", max_seqlen)
    packing = Packing(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    options = options_of(given, _sizes(qkv, qkv, packing), packing)
    out, lse = attend_qkvpacked(qkv[None], options, with_lse(given))
    return returned(given, options, out[0], lse, qkv[None].select(2, 0), qkv[None].select(2, 1), packing)


def _checked(packing: Packing, q: Tensor, k: Tensor) -> Packing:
    cu_q, cu_k, longest_q, longest_k = packing
    check_cu_seqlens("cu_seqlens_q", cu_q, q.shape[0], q.device, "max_seqlen_q", longest_q)
    check_cu_seqlens("cu_seqlens_k", cu_k, k.shape[0], q.device, "max_seqlen_k", longest_k)
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must be of as many sequences, "
            f"not of {cu_q.shape[0] - 1} and {cu_k.shape[0] - 1}"
        )
    return packing


def _sizes(q: Tensor, k: Tensor, packing: Packing) -> Sizes:
    return Sizes(
        batch=1,
        seqlen_q=q.shape[0],
        seqlen_k=k.shape[0],
        heads=q.shape[-2],
        kv_heads=k.shape[-2],
        head_dim=q.shape[-1],
        sequences=packing.cu_seqlens_q.shape[0] - 1,
        dtype=q.dtype,
        device=q.device,
    )
