"""Patterns of blocks for block-sparse attention, as bool tensors of the blocks to compute: combine them with | and &.

nq and nk: blocks of queries and of keys. H heads.
"""

import torch
from torch import Tensor

from .documents import check_length


def butterfly(blocks: int, *, device: torch.device | str | None = None) -> Tensor:
    """(1, n, n) bool: the fixed butterfly pattern, about log2(n) + 1 blocks a row.

    Block i meets block j when i = j or their numbers differ in exactly one binary digit: the blocks of all the factors
    of a butterfly matrix together, the flat block butterfly of Pixelated Butterfly (arXiv 2112.00029), which
    block-sparse FlashAttention uses as its fixed pattern (arXiv 2205.14135, section 3.3). With a local and a global
    part beside it: `butterfly(n) | local_global(n, n, local=1, globals=1)`.
    """
    check_length("blocks", blocks)
    index = torch.arange(blocks, device=device)
    apart = index[:, None] ^ index[None, :]
    return ((apart & (apart - 1)) == 0)[None]


def local_global(nq: int, nk: int, *, local: int, globals: int, device: torch.device | str | None = None) -> Tensor:
    """(1, nq, nk) bool: a band along the diagonal, and global blocks that see and are seen by all.

    local: how many blocks on each side of the diagonal are computed too; the diagonal is aligned bottom-right, so the
    last blocks of queries and of keys meet. globals: how many of the first blocks are global; 0: none.
    """
    for name, value in (("nq", nq), ("nk", nk), ("local", local), ("globals", globals)):
        check_length(name, value)
    query = torch.arange(nq, device=device)[:, None]
    key = torch.arange(nk, device=device)[None, :]
    near = (key - (query + nk - nq)).abs() <= local
    return (near | (query < globals) | (key < globals))[None]


def random(
    heads: int,
    nq: int,
    nk: int,
    density: float,
    *,
    seed: int = 0,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """(H, nq, nk) bool: for each head and block of queries as many random blocks of keys as `density` asks for.

    density: in [0, 1]; each row has exactly round(density * nk) blocks, at least one unless density is 0.
    generator: where the randomness comes from, on `device`; default a new one with `seed`.
    """
    for name, value in (("heads", heads), ("nq", nq), ("nk", nk)):
        check_length(name, value)
    if isinstance(density, bool) or not isinstance(density, (int, float)):
        raise TypeError(f"density must be a number, not {type(density).__name__}")
    if not 0.0 <= density <= 1.0:
        raise ValueError(f"density must be from 0 to 1, not {density}")
    if generator is None:
        generator = torch.Generator(device or "cpu").manual_seed(seed)
    chosen = torch.zeros(heads, nq, nk, dtype=torch.bool, device=device)
    count = min(nk, max(round(density * nk), 1)) if density > 0 else 0
    for head in chosen:  # one at a time: the random numbers take four times the pattern's memory, and more
        order = torch.rand(nq, nk, generator=generator, device=device).topk(count, dim=1).indices
        head.scatter_(1, order, True)
    return chosen
