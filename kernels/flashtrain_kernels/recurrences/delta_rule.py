"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks"; by channels: Kimi
Team 2025, "Kimi Linear").

Shapes: B batch, S sequence, H value heads, G query and key heads (H a multiple), K key
and V value dimension.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import fla
from .chunked import recur, scores
from .rows import Rows, in_full_precision
from .shared_rows import SharedRows

# Tokens; decays by channels take (C, C, K) numbers a chunk and head.
CHUNK, CHUNK_BY_CHANNELS = 64, 16


@torch.compiler.disable  # rows would be inputs of the graph, guarded by their values
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
    run: Any = fla.gated_delta_rule if fla.serves(operator, q) is None else _chunked
    if not isinstance(rows, SharedRows):
        out, rows.state = run(q, k, v, g, beta, rows, normalize, rows.state)
        return out

    def outer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        # The rule is linear in the state. So K more columns, of values 0 and an identity as the
        # state before a run, read and end as what the run makes of any state: its map, in one call.
        heads, keys, wide = v.shape[2], k.shape[3], torch.promote_types(v.dtype, torch.float32)
        initial = F.pad(torch.eye(keys, device=v.device, dtype=wide), (v.shape[3], 0))
        initial = initial * rows.documents_carry[:, None, None, None]
        initial, v = initial.expand(-1, heads, -1, -1).contiguous(), F.pad(v, (0, keys))
        return _carried(*run(q, k, v, g, beta, rows.outer, normalize, initial), rows)

    given = q, k, v, g, beta
    return rows.computed(given, outer, lambda *x: run(*x, rows.inner, normalize, None)[0])


@in_full_precision
def _carried(out: Tensor, final: Tensor, rows: SharedRows) -> Tensor:
    keys = final.shape[2]
    sizes = final.shape[3] - keys, keys
    (added, reads), (state, map_) = out.split(sizes, 3), final[rows.last].split(sizes, 3)
    return added + rows.read(reads, rows.entering(map_, state))


@in_full_precision
def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    rows: Rows,
    normalize: bool,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
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
    out, final = recur(q, k, value, g, chunks.begins, erase, initial)
    return chunks.join(out.transpose(1, 2), like), final
