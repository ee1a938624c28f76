"""The reference ("oracle") that kernels are tested against: attention in plain
PyTorch, with every feature.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension. Any floating
dtype, float64 included. It stores whole (B, H, Sq, Sk) matrices; float16 and bfloat16 inputs
are computed in float32.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import philox
from .masks import POSITION, SEQUENCE, START, BlockMask, Mask
from .options import Options, band, seed_tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Mask | BlockMask | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `flash_attn_func` in plain PyTorch, with the same arguments by keyword,
    unchecked; differentiable once.

    Args:
        q: (B, Sq, H, D).
        k, v: (B, Sk, K, D).
        dropout_seed: None: drawn from torch's generator.

    Returns:
        out (B, Sq, H, D) in q's dtype; with return_lse also the natural-log row log-sum-exp (B, H,
        Sq), float32 (float64 for float64).
    """
    left = right = None
    if not isinstance(mask, Mask):
        left, right = band(q.shape[1], k.shape[1], causal, window_size)
    options = Options(
        scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        left=left,
        right=right,
        softcap=softcap,
        dropout_p=dropout_p,
        bias=bias,
        alibi_slopes=alibi_slopes,
        seed=seed_tensor(dropout_seed, q.device) if dropout_p > 0 else None,
        mask=mask,
    )
    out, lse = apply(q, k, v, options)
    if learnable_sink is not None:  # one more score, whose value is nothing
        total = torch.logaddexp(lse, learnable_sink.to(lse.dtype)[:, None])
        out = (out * torch.exp(lse - total).transpose(1, 2)[..., None]).to(q.dtype)
        lse = total
    return (out, lse) if return_lse else out


def apply(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Compute `forward_from`, differentiable in q, k, v and the bias by `backward_from`."""
    return _Attention.apply(q, k, v, options.bias, options)


class _Attention(torch.autograd.Function):
    """`forward_from` as an autograd.Function with `backward_from`: autograd's own backward would
    multiply the zeros of masked pairs with NaN."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: Options
    ) -> tuple:
        out, lse = forward_from(q, k, v, options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        dout, dlse = gradients
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        return (
            *backward_from(dout, dlse, q, k, v, out, lse, ctx.options, ctx.needs_input_grad[3]),
            None,
        )


def forward_from(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Compute (out (B, Sq, H, D) in q's dtype, lse (B, H, Sq)) from q (B, Sq, H, D)
    and k, v (B, Sk, K, D)."""
    scores = _scores(q, k, options)
    if k.shape[1]:
        highest = scores.final.detach().amax(-1, keepdim=True)
    else:
        highest = scores.final.new_full((*scores.final.shape[:-1], 1), -torch.inf)
    # A row that sees nothing has the maximum -inf; subtracting 0 there keeps
    # exp(-inf) = 0 instead of NaN.
    highest = torch.where(highest == -torch.inf, 0.0, highest)
    # Masked again: a row with a NaN would make its masked pairs NaN too.
    weights = torch.where(scores.seen, torch.exp(scores.final - highest), 0.0)
    total = weights.sum(-1, keepdim=True)
    something = total != 0
    probabilities = weights / torch.where(something, total, 1.0)
    out = _product(_dropped(probabilities, q, k, options), scores.seen, _per_query_head(v, q))
    lse = torch.where(
        something, highest + torch.log(torch.where(something, total, 1.0)), -torch.inf
    )
    return out.transpose(1, 2).to(q.dtype).contiguous(), lse.squeeze(-1).contiguous()


def backward_from(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the gradients of `forward_from` as the kernels do (FlashAttention-2, arXiv
    2307.08691, section 3.1).

    Args:
        dout: the gradient of out, (B, Sq, H, D).
        dlse: the gradient of the log-sum-exp, (B, H, Sq), or None.
        out, lse: from `forward_from`.

    Returns:
        (dq, dk, dv, dbias); dbias in the bias's shape and dtype, None unless bias_gradient.
    """
    scores = _scores(q, k, options)
    seen, unseen = scores.seen, scores.seen.transpose(-1, -2)
    queries, keys, values = _heads_first(q), _per_query_head(k, q), _per_query_head(v, q)
    douts = _heads_first(dout.to(q.dtype))
    probabilities = _probabilities(scores, lse)
    dv = _product(_dropped(probabilities, q, k, options).transpose(-1, -2), unseen, douts)
    # The sum over keys of p dp, which is that of dout out; the log-sum-exp's own gradient is
    # p, so dlse joins it.
    delta = (douts * _heads_first(out)).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.to(delta.dtype)[..., None]
    dprobabilities = _dropped(douts @ values.transpose(-1, -2), q, k, options)
    dfinal = torch.where(seen, probabilities * (dprobabilities - delta), 0.0)
    draw = dfinal
    if options.softcap > 0:  # tanh' = 1 - tanh^2
        draw = torch.where(
            seen, dfinal * (1 - torch.tanh(scores.scaled / options.softcap) ** 2), 0.0
        )
    draw = draw * options.scale
    dq = _product(draw, seen, keys)
    dk = _product(draw.transpose(-1, -2), unseen, queries)
    dbias = None
    if bias_gradient and options.bias is not None:
        dbias = dfinal.sum_to_size(options.bias.shape).to(options.bias.dtype)
    kv_heads = (k.shape[2], q.shape[2] // k.shape[2])
    return (
        dq.transpose(1, 2).to(q.dtype),
        dk.unflatten(1, kv_heads).sum(2).transpose(1, 2).to(k.dtype),
        dv.unflatten(1, kv_heads).sum(2).transpose(1, 2).to(v.dtype),
        dbias,
    )


def probabilities(q: Tensor, k: Tensor, lse: Tensor, options: Options) -> Tensor:
    """Return the attention weights (B, H, Sq, Sk) before dropout, given the call's
    log-sum-exp (B, H, Sq)."""
    return _probabilities(_scores(q, k, options), lse)


def dropout_mask(
    q_shape: torch.Size | tuple[int, ...],
    k_shape: torch.Size | tuple[int, ...],
    options: Options,
    device: torch.device | str,
) -> Tensor:
    """Return (B, H, Sq, Sk) bool: True for the attention weights that dropout keeps,
    whether masked or not."""
    shape = (q_shape[0], q_shape[2], q_shape[1], k_shape[1])
    if options.dropout_p == 0 or options.seed is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    places = _places(q_shape[0], q_shape[1], k_shape[1], options, device)
    start = places.start[:, None, :, None]
    head = torch.arange(q_shape[2], device=device)[None, :, None, None]
    kept = philox.keep_mask(
        options.seed,
        places.sequence[:, None, :, None],
        head,
        places.query[:, None, :, None] - start,
        places.key[:, None, None, :] - start,
        options.dropout_p,
    )
    return kept.expand(shape)


class _Scores(NamedTuple):
    """The scores of all pairs, each (B, H, Sq, Sk)."""

    scaled: Tensor  # q k^T * scale
    final: Tensor  # after softcap, ALiBi and bias; -inf where masked
    seen: Tensor  # True where not masked


class _Places(NamedTuple):
    """Where queries and keys stand: of each query, (B or 1, Sq), its position and sequence; of each
    key, (B or 1, Sk), its position."""

    query: Tensor
    key: Tensor
    start: Tensor  # the first of each query's sequence
    sequence: Tensor  # and that sequence's number


def visible_mask(
    seqlen_q: int, seqlen_k: int, options: Options, device: torch.device | str
) -> Tensor:
    """Return the pairs that band, mask and bias leave visible: bool, (B or 1, H
    or 1, Sq or 1, Sk or 1)."""
    options = options.with_mask()
    seen = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
    query = torch.arange(seqlen_q, device=device)[:, None]
    key = torch.arange(seqlen_k, device=device)[None, :]
    if options.left is not None:
        seen = seen & (key >= query + options.left)
    if options.right is not None:
        seen = seen & (key <= query + options.right)
    if isinstance(options.mask, Mask):
        seen = seen & options.mask.dense()[:, None]
    elif isinstance(options.mask, BlockMask):
        seen = seen & options.mask.dense()
    if options.bias is not None:
        seen = seen & (options.bias != -torch.inf)
    return seen


def alibi(batch: int, seqlen_q: int, seqlen_k: int, options: Options, dtype: torch.dtype) -> Tensor:
    """Return the ALiBi bias (arXiv 2108.12409), -slope * |distance|: (B or 1, H, Sq, Sk)."""
    slopes = options.alibi_slopes
    if slopes is None:
        raise ValueError("options.alibi_slopes must be given to compute the ALiBi bias, not None")
    places = _places(batch, seqlen_q, seqlen_k, options, slopes.device)
    if slopes.dim() == 1:
        slopes = slopes[None, :, None]
    else:
        slopes = slopes[places.sequence.long()].transpose(1, 2)  # (B, H, Sq)
    distance = (places.query[:, :, None] - places.key[:, None, :]).abs()
    return -slopes.to(dtype)[..., None] * distance[:, None].to(dtype)


def _scores(q: Tensor, k: Tensor, options: Options) -> _Scores:
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k = k.shape[1]
    scaled = _heads_first(q) @ _per_query_head(k, q).transpose(-1, -2) * options.scale
    final = (
        scaled if options.softcap == 0 else options.softcap * torch.tanh(scaled / options.softcap)
    )
    if options.alibi_slopes is not None:
        final = final + alibi(batch, seqlen_q, seqlen_k, options, final.dtype)
    if options.bias is not None:
        final = final + options.bias
    seen = visible_mask(seqlen_q, seqlen_k, options, q.device).expand(
        batch, heads, seqlen_q, seqlen_k
    )
    return _Scores(scaled, final.masked_fill(~seen, -torch.inf), seen)


def _places(
    batch: int, seqlen_q: int, seqlen_k: int, options: Options, device: torch.device | str
) -> _Places:
    key = torch.arange(seqlen_k, device=device)[None]
    if isinstance(options.mask, Mask):
        queries = options.mask.queries
        key = key if options.mask.keys is None else options.mask.keys
        return _Places(queries[POSITION], key, queries[START], queries[SEQUENCE])
    query = torch.arange(seqlen_q, device=device)[None] + (seqlen_k - seqlen_q)
    sequence = torch.arange(batch, device=device)[:, None].expand(batch, seqlen_q)
    return _Places(query, key, torch.zeros_like(query), sequence)


def _probabilities(scores: _Scores, lse: Tensor) -> Tensor:
    rows = lse.to(scores.final.dtype)[..., None]
    return torch.where(
        scores.seen, torch.exp(scores.final - torch.where(rows == -torch.inf, 0.0, rows)), 0.0
    )


def _dropped(weights: Tensor, q: Tensor, k: Tensor, options: Options) -> Tensor:
    """weights (B, H, Sq, Sk) after dropout: the kept ones are divided by the share that is kept."""
    if options.dropout_p == 0:
        return weights
    return (
        weights
        * dropout_mask(q.shape, k.shape, options, q.device)
        / philox.keep_probability(options.dropout_p)
    )


def _product(weights: Tensor, seen: Tensor, values: Tensor) -> Tensor:
    """weights (..., M, N) times values (..., N, D), where the values that are not finite reach only
    the rows that see them: plainly, a masked pair's 0 * NaN would be NaN."""
    finite = torch.isfinite(values)
    product = weights @ torch.where(finite, values, 0.0)
    return torch.where(seen.to(values.dtype) @ (~finite).to(values.dtype) > 0, torch.nan, product)


def _heads_first(x: Tensor) -> Tensor:
    """(B, S, heads, D) -> (B, heads, S, D), at least float32."""
    return x.transpose(1, 2).to(torch.promote_types(x.dtype, torch.float32))


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """(B, Sk, K, D) -> (B, H, Sk, D): query head h reads key head h // (H / K)."""
    return _heads_first(x).repeat_interleave(q.shape[2] // x.shape[2], dim=1)
