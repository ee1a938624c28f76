"""Attention as a textbook writes it, in float64, differentiable by autograd: what the interface and
the reference are compared with. Finite inputs only.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

import torch

from flashtrain_kernels import philox


def window_pairs(
    seqlen_q: int, seqlen_k: int, left: int = -1, right: int = -1, causal: bool = False
) -> torch.Tensor:
    """(Sq, Sk) bool, by flash-attn's description of windows; bottom-right aligned."""
    distance = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    # Further than any pair.
    left, right = (seqlen_q + seqlen_k if side < 0 else side for side in (left, right))
    return (distance >= -left) & (distance <= (0 if causal else right))


def sequence_pairs(lengths: list[tuple[int, int]], *window: int | bool) -> torch.Tensor:
    """window_pairs of sequences one after the other, (queries, keys) of each; nothing
    of one sees another's."""
    seen = torch.zeros(sum(q for q, _ in lengths), sum(k for _, k in lengths), dtype=torch.bool)
    row = column = 0
    for length_q, length_k in lengths:
        seen[row : row + length_q, column : column + length_k] = window_pairs(
            length_q, length_k, *window
        )
        row, column = row + length_q, column + length_k
    return seen


def plain_attention(
    q, k, v, *, scale=None, seen=None, softcap=0.0, slopes=None, bias=None, kept=None, p=0.0,
    sink=None
):  # fmt: skip
    """(out (B, Sq, H, D), lse (B, H, Sq)). seen, kept: bool, broadcast to (B, H, Sq, Sk); slopes
    (H,) or (B, H); sink (H,): the score of one more key, whose value is nothing."""
    seqlen_q, seqlen_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    keys, values = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        distance = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - torch.arange(seqlen_k)
        scores = scores - slopes.to(scores.dtype)[..., None, None] * distance.abs()
    if bias is not None:
        scores = scores + bias
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, sink[:, None, None].expand(*scores.shape[:3], 1)), -1)
    lse = torch.logsumexp(scores, -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)  # NaN: a row that sees nothing
    weights = weights[..., :seqlen_k]
    if kept is not None:
        weights = weights * kept / philox.keep_probability(p)
    return torch.einsum("bhij,bjhd->bihd", weights, values), lse


def tensors(
    batch=2, seqlen_q=6, seqlen_k=9, heads=4, kv_heads=2, head_dim=5, dtype=torch.float64, seed=0
):
    """Random q, k and v, the same for every dtype, that want gradients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return (
            torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        )

    kv = (batch, seqlen_k, kv_heads, head_dim)
    return draw(batch, seqlen_q, heads, head_dim), draw(*kv), draw(*kv)


def cumulative(lengths, device="cpu"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def each_alone(attention, q, k, v, cu_q, cu_k, slopes=None, seed=None, **options):
    """(out, lse) of packed sequences one by one; sequence n draws its dropout
    as row n of a batch."""
    outs, lses = [], []
    for n, (a, b, c, d) in enumerate(zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False)):
        if slopes is not None:
            options["alibi_slopes"] = slopes if slopes.dim() == 1 else slopes[n : n + 1]
        if seed is not None:
            options["dropout_seed"] = torch.tensor([seed, n, 0])
        out, lse = attention(q[None, a:b], k[None, c:d], v[None, c:d], **options, return_lse=True)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def assert_same(got, wanted, inputs):
    """Equal outputs, and equal gradients of a loss that uses all of them.

    A plain formula has NaN gradients at the rows that see nothing, which are 0; their
    log-sum-exp is left out.
    """
    losses = []
    for outputs in (got, wanted):
        generator = torch.Generator().manual_seed(3)
        weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outputs]
        losses.append(
            sum(
                torch.where(x.isfinite(), x * weight, 0.0).sum()
                for x, weight in zip(outputs, weights, strict=True)
            )
        )
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(*(torch.autograd.grad(loss, inputs) for loss in losses), strict=True):
        torch.testing.assert_close(one, other.nan_to_num(0.0))


def assert_one_graph_serves(function, calls):
    """torch.compile makes one graph of the whole function, which computes what it does for
    each of these arguments."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for arguments in calls:
        results = []
        for each in (compiled, function):
            torch.manual_seed(0)
            results.append(each(*arguments))
        torch.testing.assert_close(*results)
    assert len(graphs) == 1
