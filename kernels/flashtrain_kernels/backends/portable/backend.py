"""The portable kernels as a backend: they serve every call, with tiles from the table.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

import torch
from torch import Tensor

from ...environment import INTERPRETED
from ...masks import BlockMask, Mask
from ...options import Options
from .. import Call, Direction
from . import tile_table
from .tile_table import Tiles

NAME, TITLE = "portable", "portable Triton kernels"


def unavailable(device: torch.device) -> str | None:
    """They run wherever kernels run at all."""
    return None


def serves(call: Call, direction: Direction) -> str | None:
    """They serve every call."""
    return None


def plan_blocks(mask: Mask, head_dim: int, dtype: torch.dtype, rich: bool) -> tuple[int, ...]:
    """The sizes of the table's tiles for calls with a mask."""
    return tile_table.plan_blocks(mask.queries.device, head_dim, dtype, rich)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    from .forward import forward as run  # Triton is imported only where it is used

    options = call.readied(plan_blocks)
    return run(call.q, call.k, call.v, options, _tiles(call, options).forward, tf32=not INTERPRETED)


def backward(
    call: Call,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    dbias: Tensor | None,
) -> None:
    """Fill the gradients."""
    from .backward import backward as run

    q, k, v, _ = call
    options = call.readied(plan_blocks)
    run(dout, dlse, q, k, v, out, lse, options, gradients, dbias, _tiles(call, options), tf32=not INTERPRETED)


def describe(call: Call, direction: Direction) -> str:
    """The table's tiles (a mask that was planned for others keeps their sizes)."""
    mask = call.options.mask
    tiles = tile_table.tiles_for(
        call.q.device,
        call.q.shape[3],
        call.q.dtype,
        tile_table.kind_of(call.q, call.k, call.options),
        block_size=mask.block_size if isinstance(mask, BlockMask) else None,
    )
    if direction == "forward":
        return str(tiles.forward)
    return f"dK/dV {tiles.dkdv}; dQ {tiles.dq}{' in one launch' if tiles.together else ''}"


def _tiles(call: Call, options: Options) -> Tiles:
    q, mask = call.q, options.mask
    return tile_table.tiles_for(
        q.device,
        q.shape[3],
        q.dtype,
        tile_table.kind_of(q, call.k, options),
        blocks=mask.plan.blocks if isinstance(mask, Mask) and mask.plan is not None else None,
        block_size=mask.block_size if isinstance(mask, BlockMask) else None,
    )
