"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks"; by channels: Kimi
Team 2025, "Kimi Linear").

Shapes: B batch, S sequence, H value heads, G query and key heads (H a multiple), K key
and V value dimension.
"""

import torch
from torch import Tensor

from . import fla
from .chunked import recur, scores
from .rows import Rows, in_full_precision

# Tokens; decays by channels take (C, C, K) numbers a chunk and head.
CHUNK, CHUNK_BY_CHANNELS = 64, 16


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: Rows, *, normalize: bool = False
) -> Tensor:
    """Return q S / sqrt(K), where S decays by exp(g) and gains k (beta (v - k S))^T, (B,
    S, H, V) in q's dtype.

    Args:
        q, k: (B, S, G, K).
        v: (B, S, H, V).
        g: Logarithms of the decays, (B, S, H), or (B, S, H, K) by channels.
        beta: (B, S, H), the share of the old value that is replaced.
        rows: The documents.
        normalize: Whether q and k are divided by their lengths, sqrt(|x|^2 + 1e-6).
    """
    operator = "delta rule" if g.dim() == 3 else "delta rule by channels"
    run = fla.gated_delta_rule if fla.serves(operator, q) is None else _chunked
    return run(q, k, v, g, beta, rows, normalize)


@in_full_precision
def _chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: Rows, normalize: bool
) -> Tensor:
    if normalize:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q * q.shape[3] ** -0.5, k))
    chunks, like = rows.chunks(CHUNK if g.dim() == 3 else CHUNK_BY_CHANNELS), v
    g, beta = g[..., None] if g.dim() == 3 else g, beta[..., None]
    q, k, v, g, beta = (chunks.split(x).transpose(1, 2) for x in (q, k, v, g, beta))
    g = g.cumsum(2)
    # What a token writes depends on what the chunk's earlier ones wrote: a triangular
    # system, solved once.
    written = torch.cat((beta * v, beta * k * g.exp()), -1)
    written = torch.linalg.solve_triangular(
        scores(beta * k, k, g), written, upper=False, unitriangular=True
    )
    value, erase = written.split((v.shape[3], k.shape[3]), -1)
    return chunks.join(recur(q, k, value, g, chunks.begins, erase).transpose(1, 2), like)
