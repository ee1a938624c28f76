"""flash-attn's options in the form the operators take: causal and window as a band, a dropout seed as a tensor.

Sq queries, Sk keys.
"""

import torch
from torch import Tensor


def band(
    seqlen_q: int, seqlen_k: int, causal: bool, window_size: tuple[int, int] = (-1, -1)
) -> tuple[int | None, int | None]:
    """(left, right): query i sees key j when i + left <= j <= i + right; None is no bound.

    flash-attn aligns bottom-right: query i stands at key position i + Sk - Sq, and sees window_size[0] keys before it
    and window_size[1] after it, itself included; -1 is no bound, and causal is a window that ends at 0.
    """
    shift = seqlen_k - seqlen_q
    left = None if window_size[0] < 0 else shift - window_size[0]
    right = None if window_size[1] < 0 else shift + window_size[1]
    return left, shift if causal else right


def seed_tensor(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """(3,) int64 on the device: the seed, and what is added to the numbers of sequences and heads (0 unless given).

    None draws a seed there from torch's generator, without waiting for it: recomputation under activation
    checkpointing, which restores the generator, draws the same one again. A tensor of one element is the seed alone.
    """
    if seed is None:
        seed = torch.randint(0, 2**63 - 1, (1,), device=device, dtype=torch.int64)
    elif not isinstance(seed, Tensor):
        seed = torch.full((1,), seed, device=device, dtype=torch.int64)
    return seed.reshape(3) if seed.numel() == 3 else torch.nn.functional.pad(seed.reshape(1), (0, 2))
