"""The selective scan of Mamba-1 (Gu and Dao 2023, "Mamba"), in which each channel's
states decay by themselves.

Shapes: B batch, S sequence, E channels, N state dimension, c chunks of C tokens.
"""

import torch
from torch import Tensor

from .rows import Rows, in_full_precision

CHUNK = 64  # tokens


@in_full_precision
def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, rows: Rows, D: Tensor
) -> Tensor:
    """Return S C + D x, where S = exp(A dt) S + (dt x) B^T within each document,
    (B, E, S) in x's dtype.

    Args:
        x, dt: (B, E, S), dt at least 0.
        A, D: (E, N), negative, and (E,).
        B, C: (B, N, S).
        rows: The documents.
    """
    chunks = rows.chunks(CHUNK)
    step = chunks.split(dt.mT)[..., None]
    written = step * chunks.split(x.mT)[..., None] * chunks.split(B.mT)[:, :, None]  # (c, C, E, N)
    decay = A * step  # logarithms
    empty = written.new_zeros(written.shape[2:])
    states, state = [], empty
    for token in range(CHUNK):  # of all chunks at once, each from an empty state
        state = decay[:, token].exp() * state + written[:, token]
        states.append(state)
    within, decay, entering = torch.stack(states, 1), decay.cumsum(1).exp(), []
    for chunk, anew in enumerate(chunks.begins):
        state = empty if anew else decay[chunk - 1, -1] * state + within[chunk - 1, -1]
        entering.append(state)
    states_read = (within + decay * torch.stack(entering)[:, None]) * chunks.split(C.mT)[:, :, None]
    out = chunks.join(states_read.sum(-1), x.mT).mT
    return (out + x * D[:, None]).contiguous()
