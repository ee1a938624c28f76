"""The portable kernels as a backend: they serve every call, with tiles from the table."""

import torch
from torch import Tensor

from ...masks import Mask
from .. import Call, Direction, Gradients
from . import tile_table

NAME, TITLE = "portable", "portable Triton kernels"


def unavailable(device: torch.device) -> str | None:
    """They run wherever kernels run at all."""
    return None


def serves(call: Call, direction: Direction) -> str | None:
    """They serve every call."""
    return None


def plan_blocks(mask: Mask, head_dim: int, dtype: torch.dtype, rich: bool, softcap: bool) -> tuple[int, ...]:
    """The sizes of the table's tiles for calls with a mask."""
    return tile_table.plan_blocks(mask.queries.device, head_dim, dtype, rich or softcap)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    from .forward import forward_launch  # Triton is imported only where it is used

    call, (out, lse) = call.readied(plan_blocks), call.empty_results()
    forward_launch(call, out, lse, tile_table.tiles_of(call).forward).run()
    return out, lse


def backward(call: Call, gradients: Gradients) -> None:
    """Fill the gradients."""
    from .backward import backward_launches
    from .dbias import dbias_launch

    call, lse = call.readied(plan_blocks), gradients.lse
    tiles = tile_table.tiles_of(call)
    # Two allocations: the second half of one may not be aligned to 16 bytes, for which Triton would compile anew.
    rows = [torch.empty(lse.shape, dtype=torch.float32, device=lse.device) for _ in range(2)]
    for launch in backward_launches(call, gradients, rows, tiles):
        launch.run()
    if gradients.dbias is not None:
        dbias_launch(call, gradients.dout, rows, gradients.dbias, tiles.dbias).run()


def describe(call: Call, direction: Direction) -> str:
    """The table's tiles, in the sizes that a mask was planned for."""
    tiles = tile_table.tiles_of(call)
    if direction == "forward":
        return str(tiles.forward)
    return f"dK/dV {tiles.dkdv}; dQ {tiles.dq}{' in one launch' if tiles.together else ''}"
