"""The backward pass (FlashAttention-2, arXiv 2307.08691, algorithm 2), without atomics: bitwise deterministic.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension. Two launches: rows.py's kernel, then
dq_dkdv.py's, in which some programs go key by key (dkdv.py) and the others query by query (dq.py); or dq.py's kernel,
which does the work of rows.py too, then dkdv.py's. Which of the two is faster the tile table says. A third one,
dbias.py's, where the bias wants a gradient. The scores are computed in each, seven products where five would do; in
exchange no two programs ever add to the same number.
"""

from collections.abc import Sequence

import torch

from ...options import Options
from .dbias import dbias_launch
from .dkdv import dkdv_kernel
from .dq import dq_kernel
from .dq_dkdv import both_kernel
from .launch import Launch, call_constants, ceil_div, option_arguments
from .rows import ROWS, rows_kernel
from .tile_table import Tile, Tiles


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
    together: bool,
    tf32: bool = True,
) -> tuple[Launch, Launch]:
    """The two launches, in this order, that fill gradients = dq, and dk and dv: both kernels together in the second one
    or each in one of its own.

    rows: two (B, H, Sq) float32 workspaces, base-2 LSE and delta: the first launch writes it, the second reads it.
    """
    dq, dk, dv = gradients
    batch, seqlen_q, heads, _ = q.shape
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
    dlse_or_any = lse if dlse is None else dlse
    programs_dkdv = ceil_div(k.shape[1], tile_dkdv.block_k) * batch * k.shape[2]
    programs_dq = ceil_div(seqlen_q, tile_dq.block_q) * batch * heads
    dkdv_constants = call_constants(q, k, options, tile_dkdv, tf32, looped_keys=False)
    dq_constants = call_constants(q, k, options, tile_dq, tf32, looped_keys=True)
    if together:
        own = ("BLOCK_K", "BLOCK_Q", "TILES")
        first = Launch(
            kernel=rows_kernel,
            grid=(ceil_div(seqlen_q, ROWS) * batch * heads,),
            args=(
                dout, out, lse, dlse_or_any, *rows, *dout.stride()[:3], *out.stride()[:3], heads, seqlen_q,
            ),
            constants={
                "HAS_DLSE": dlse is not None, "HEAD_DIM": q.shape[3], "BLOCK_D": dq_constants["BLOCK_D"],
                "BLOCK_Q": ROWS,
            },
            options={"num_warps": 4},
        )  # fmt: skip
        second = Launch(
            kernel=both_kernel,
            grid=(max(programs_dkdv, programs_dq), 2),
            args=(
                q, k, v, dout, *rows, dq, *strides, *dq.stride()[:3], dk, dv, *dk.stride()[:3], *dv.stride()[:3],
                options.scale, *option_arguments(q, k, lse, options, "dkdv", "dq"), programs_dkdv, programs_dq,
            ),
            constants={
                **{name: value for name, value in dq_constants.items() if name not in own},
                **{f"{name}_DKDV": dkdv_constants[name] for name in own},
                **{f"{name}_DQ": dq_constants[name] for name in own},
            },
            options=tile_dkdv.options(),
        )  # fmt: skip
        return first, second
    dkdv = Launch(
        kernel=dkdv_kernel,
        grid=(programs_dkdv,),
        args=(
            q, k, v, dout, *rows, dk, dv, *strides, *dk.stride()[:3], *dv.stride()[:3], options.scale,
            *option_arguments(q, k, lse, options, "dkdv"),
        ),
        constants=dkdv_constants,
        options=tile_dkdv.options(),
    )  # fmt: skip
    dquery = Launch(
        kernel=dq_kernel,
        grid=(programs_dq,),
        args=(
            q, k, v, dout, out, lse, dlse_or_any, *rows, dq, *strides, *out.stride()[:3], *dq.stride()[:3],
            options.scale, *option_arguments(q, k, lse, options, "dq"),
        ),
        constants={"HAS_DLSE": dlse is not None, "HAS_ROWS": False, **dq_constants},
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
    tiles: Tiles,
    tf32: bool = True,
) -> None:
    """Fill the gradients dq, dk, dv (any strides whose last is 1) and dbias, if given."""
    # Two allocations: the second half of one may not be aligned to 16 bytes, for which Triton would compile anew.
    lse2, delta = (torch.empty(lse.shape, dtype=torch.float32, device=lse.device) for _ in range(2))
    rows = lse2, delta
    for launch in backward_launches(
        dout, dlse, q, k, v, out, lse, options, gradients, rows, tiles.dkdv, tiles.dq, tiles.together, tf32
    ):  # fmt: skip
        launch.run()
    if dbias is not None:
        dbias_launch(dout, q, k, v, options, rows, dbias, tiles.dbias, tf32).run()
