"""The chunked form that linear recurrences share: products within a chunk, and a
state from chunk to chunk.

A head's state S (K, V) decays and is written to, S = exp(g) S + k v^T, and read as q S.

Shapes: c chunks of C tokens, H heads, K key and V value dimension.
"""

import torch
from torch import Tensor


def scores(x: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """Return (c, H, C, C): x_i . k_j decayed from token j to token i where j <= i, else 0;
    arguments as in `recur`."""
    hidden = torch.ones(g.shape[2], g.shape[2], dtype=torch.bool, device=g.device).triu(1)[
        ..., None
    ]
    # Differences first: exp(-g) alone overflows. Hidden ones may be positive,
    # hence masked before exp.
    decay = (g[..., :, None, :] - g[..., None, :, :]).masked_fill(hidden, -torch.inf).exp()
    if g.shape[3] == 1:
        return (x @ k.mT) * decay[..., 0]
    return torch.einsum("...id,...jd,...ijd->...ij", x, k, decay)


def recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    begins: list[bool],
    erase: Tensor | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return (c, H, C, V), the outputs for q, k (c, H, C, K) and v (c, H, C, V), where g are
    logarithms of the decays summed from the chunk's begin, (c, H, C, K) or (c, H, C, 1), and
    `begins` says with which chunks documents begin, whose states are empty.

    With erase (c, H, C, K) what is written is not v but v - erase S, S the state before the chunk.
    With the documents' initial states (N, H, K, V) also return their final ones.
    """
    within, last = scores(q, k, g), g[:, :, -1:]
    q, k, decay = q * g.exp(), k * (last - g).exp(), last.exp().mT
    empty = v.new_zeros(v.shape[1], k.shape[3], v.shape[3])
    outputs, state, final = [], empty, []
    for chunk, anew in enumerate(begins):
        if anew and initial is not None:
            final.append(state)  # of the document before
        state = (empty if initial is None else initial[len(final) - 1]) if anew else state
        written = v[chunk] if erase is None else v[chunk] - erase[chunk] @ state
        outputs.append(q[chunk] @ state + within[chunk] @ written)
        state = decay[chunk] * state + k[chunk].mT @ written
    states = None if initial is None else torch.stack([*final[1:], state])
    return torch.stack(outputs), states
