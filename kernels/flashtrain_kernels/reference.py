"""The oracle: attention in plain PyTorch, any floating dtype (float64 included), with nothing clever in it.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, G = H / K query heads a key head, D head dimension.

It stores the whole (Sq, Sk) matrix and says what the kernels must compute, edge cases included: a pair that is masked
contributes nothing, not even where the key's value is inf or NaN; a query that sees no key gives output 0, log-sum-exp
-inf and no gradient. float16 and bfloat16 inputs are computed in float32.
"""

import torch

from .masks import Documents, visible


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    documents: Documents | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T * scale + mask) v, differentiable by autograd.

    q: (B, Sq, H, D); k, v: (B, Sk, K, D). Returns out (B, Sq, H, D) in q's dtype and, with return_lse, the natural-log
    row log-sum-exp (B, H, Sq) in float32 (float64 for float64 inputs).
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    mask = _mask(q, k, causal, documents)
    scores = _scores(q, k, scale, mask)
    # A row that sees nothing has the maximum -inf; subtracting 0 there keeps exp(-inf) = 0 instead of NaN.
    highest = scores.detach().amax(-1, keepdim=True) if k.shape[1] else scores.new_zeros(*scores.shape[:-1], 1)
    highest = torch.where(highest == -torch.inf, 0.0, highest)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True)
    seen = total != 0
    probabilities = weights / torch.where(seen, total, 1.0)
    values = _heads_first(v)
    finite = torch.isfinite(values)
    out = probabilities @ torch.where(finite, values, 0.0)[:, :, None]
    # 0 * NaN is NaN: the values that are not finite reach only the rows that see them.
    allowed = torch.ones_like(scores) if mask is None else mask.expand_as(scores).to(scores.dtype)
    out = torch.where(allowed @ (~finite).to(scores.dtype)[:, :, None] > 0, torch.nan, out)
    out = out.reshape(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2).to(q.dtype)
    if not return_lse:
        return out
    lse = torch.where(seen, highest + torch.log(torch.where(seen, total, 1.0)), -torch.inf)
    return out, lse.reshape(q.shape[0], q.shape[2], q.shape[1])


def attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    documents: Documents | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients (dq, dk, dv), written out as the kernels compute them (FlashAttention-2, arXiv 2307.08691,
    section 3.1).

    dout: gradient of out, (B, Sq, H, D); dlse: gradient of the log-sum-exp, (B, H, Sq), or None. The log-sum-exp's
    gradient with respect to the scores is the probabilities themselves, so it is subtracted from delta.
    """
    heads, group = k.shape[2], q.shape[2] // k.shape[2]
    mask = _mask(q, k, causal, documents)
    scores = _scores(q, k, softmax_scale, mask)
    rows = lse.to(scores.dtype).reshape(q.shape[0], heads, group, q.shape[1], 1)
    probabilities = torch.where(scores == -torch.inf, 0.0, torch.exp(scores - rows))
    dout_heads = _grouped(dout.to(q.dtype), heads)
    delta = (dout_heads * _grouped(out, heads)).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.to(scores.dtype).reshape(rows.shape)
    dprobabilities = dout_heads @ _heads_first(v)[:, :, None].transpose(-1, -2)
    dscores = probabilities * (dprobabilities - delta) * softmax_scale
    dq = dscores @ _heads_first(k)[:, :, None]
    dk = (dscores.transpose(-1, -2) @ _grouped(q, heads)).sum(2)
    dv = (probabilities.transpose(-1, -2) @ dout_heads).sum(2)
    dq = dq.reshape(q.shape[0], q.shape[2], q.shape[1], q.shape[3])
    return dq.transpose(1, 2).to(q.dtype), dk.transpose(1, 2).to(k.dtype), dv.transpose(1, 2).to(v.dtype)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
    scores = _grouped(q, k.shape[2]) @ _heads_first(k)[:, :, None].transpose(-1, -2) * scale
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _mask(q: torch.Tensor, k: torch.Tensor, causal: bool, documents: Documents | None) -> torch.Tensor | None:
    mask = visible(q.shape[1], k.shape[1], causal=causal, documents=documents, device=q.device)
    return mask[:, :, None] if mask is not None and mask.dim() == 4 else mask


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """(B, S, heads, D) -> (B, heads, S, D), at least float32."""
    return x.transpose(1, 2).to(torch.promote_types(x.dtype, torch.float32))


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """(B, Sq, H, D) -> (B, K, G, Sq, D): query head h reads key head h // G."""
    return _heads_first(x).unflatten(1, (kv_heads, x.shape[2] // kv_heads))
