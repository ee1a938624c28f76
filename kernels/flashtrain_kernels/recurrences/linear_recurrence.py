"""Linear recurrences whose state decays and is added to: state spaces (Dao and Gu 2024,
"Transformers are SSMs", which is Mamba-2), and at constant rates lightning attention (Qin et al.
2024, "Lightning Attention-2", in MiniMax).

Shapes: B batch, S sequence, H heads, G groups of heads that share keys and queries, K and V
(state spaces: N and P).
"""

from typing import Any

import torch
from torch import Tensor

from . import fla
from .chunked import recur
from .rows import Rows, in_full_precision
from .shared_rows import SharedRows

CHUNK = 64  # tokens


@torch.compiler.disable  # rows would be inputs of the graph, guarded by their values
def decayed_sum(v: Tensor, g: Tensor, k: Tensor, q: Tensor, rows: Rows) -> Tensor:
    """Return q S, where S = exp(g) S + k v^T within each document, (B, S, H, V) in v's dtype.

    Args:
        v: (B, S, H, V).
        g: (B, S, H), logarithms of the decays.
        k, q: (B, S, G, K).
        rows: The documents.
    """
    run: Any = fla.decayed_sum if fla.serves("decayed sum", k) is None else _chunked
    if not isinstance(rows, SharedRows):
        out, rows.state = run(v, g, k, q, rows, rows.state)
        return out

    def outer(v: Tensor, g: Tensor, k: Tensor, q: Tensor) -> Tensor:
        sizes = len(rows.outer.bounds) - 1, v.shape[2], k.shape[3], v.shape[3]
        empty = v.new_zeros(sizes, dtype=torch.promote_types(v.dtype, torch.float32))
        return _carried(*run(v, g, k, q, rows.outer, empty), g, q, rows)

    return rows.computed((v, g, k, q), outer, lambda *x: run(*x, rows.inner, None)[0])


@in_full_precision
def _carried(out: Tensor, final: Tensor, g: Tensor, q: Tensor, rows: SharedRows) -> Tensor:
    summed = rows.runs.join(rows.runs.split(g).cumsum(1), g)
    # (1, t, H), of the state before a run, while its document goes on.
    decay = summed.masked_fill(~rows.carries[:, None], -torch.inf).exp()
    map_ = decay.flatten(0, 1)[rows.ends, :, None, None]
    states = rows.entering(map_, final[rows.last]).unflatten(1, (q.shape[2], -1))
    # Of a group's heads at once: queries by heads would be as wide as all their states' keys.
    found = rows.read(q, states.transpose(2, 3).flatten(3)).unflatten(3, (-1, out.shape[3]))
    return out + found.flatten(2, 3) * decay[..., None]


def state_space(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, rows: Rows, D: Tensor | None = None
) -> Tensor:
    """Return C S + D x, where S = exp(A dt) S + dt B x^T within each document, (B,
    S, H, P) in x's dtype.

    Args:
        x: (B, S, H, P).
        dt: (B, S, H) float32, at least 0.
        A, D: (H,), A negative.
        B, C: (B, S, G, N).
        rows: The documents.
    """
    out = decayed_sum(x * dt[..., None], A * dt, B, C, rows)
    return (out if D is None else out + x * D[:, None]).to(x.dtype)


@in_full_precision
def _chunked(
    v: Tensor, g: Tensor, k: Tensor, q: Tensor, rows: Rows, initial: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    chunks, like = rows.chunks(CHUNK), v
    k, q = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (k, q))
    v, g, k, q = (chunks.split(x).transpose(1, 2) for x in (v, g[..., None], k, q))
    out, final = recur(q, k, v, g.cumsum(2), chunks.begins, initial=initial)
    return chunks.join(out.transpose(1, 2), like), final
