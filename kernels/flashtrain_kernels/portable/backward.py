"""The backward pass (FlashAttention-2, arXiv 2307.08691, algorithm 2), without atomics: bitwise deterministic.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension. Two launches: dq.py's kernel, query by
query, then dkdv.py's, key by key; a third one, dbias.py's, where the bias wants a gradient. The scores are computed in
each, seven products where five would do; in exchange no two programs ever add to the same number.
"""

from collections.abc import Sequence

import torch

from ..dispatch import Tile
from ..options import Options
from .dbias import dbias_launch
from .dkdv import dkdv_kernel
from .dq import dq_kernel
from .launch import Launch, call_constants, ceil_div, option_arguments


def backward_launches(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: Options,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows: Sequence[torch.Tensor],
    tile_dkdv: Tile,
    tile_dq: Tile,
    tf32: bool = True,
) -> tuple[Launch, Launch]:
    """The two launches, in this order, that fill gradients = dq, and dk and dv.

    rows: two (B, H, Sq) float32 workspaces, base-2 LSE and delta: the first launch writes it, the second reads it.
    """
    dq, dk, dv = gradients
    batch, seqlen_q, heads, _ = q.shape
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
    dkdv = Launch(
        kernel=dkdv_kernel,
        grid=(ceil_div(k.shape[1], tile_dkdv.block_k) * batch * k.shape[2],),
        args=(
            q, k, v, dout, rows[0], rows[1], dk, dv, *strides, *dk.stride()[:3], *dv.stride()[:3], options.scale,
            *option_arguments(q, k, lse, options, "dkdv"),
        ),
        constants=call_constants(q, k, options, tile_dkdv, tf32, looped_keys=False),
        options=tile_dkdv.options(),
    )  # fmt: skip
    dquery = Launch(
        kernel=dq_kernel,
        grid=(ceil_div(seqlen_q, tile_dq.block_q) * batch * heads,),
        args=(
            q, k, v, dout, out, lse, lse if dlse is None else dlse, rows[0], rows[1], dq,
            *strides, *out.stride()[:3], *dq.stride()[:3], options.scale, *option_arguments(q, k, lse, options, "dq"),
        ),
        constants={
            "HAS_DLSE": dlse is not None, **call_constants(q, k, options, tile_dq, tf32, looped_keys=True)
        },
        options=tile_dq.options(),
    )  # fmt: skip
    return dquery, dkdv


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: Options,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dbias: torch.Tensor | None,
    tiles: tuple[Tile, Tile, Tile],
    tf32: bool = True,
) -> None:
    """Fill the gradients dq, dk, dv (any strides whose last is 1) and dbias, if given. tiles: of dkdv, dq and dbias."""
    # Two allocations: the second half of one may not be aligned to 16 bytes, for which Triton would compile anew.
    lse2, delta = (torch.empty(lse.shape, dtype=torch.float32, device=lse.device) for _ in range(2))
    rows = lse2, delta
    for launch in backward_launches(
        dout, dlse, q, k, v, out, lse, options, gradients, rows, tiles[0], tiles[1], tf32
    ):  # fmt: skip
        launch.run()
    if dbias is not None:
        dbias_launch(dout, q, k, v, options, rows, dbias, tiles[2], tf32).run()
