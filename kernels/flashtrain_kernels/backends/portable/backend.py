"""The portable kernels as a backend: they support every call, with tile sizes from a table."""

import torch
from torch import Tensor

from ...masks import Mask
from .. import Call, Direction, Gradients
from . import tile_table

NAME, TITLE = "portable", "portable Triton kernels"


def unavailable(device: torch.device) -> str | None:
    """Return None: the portable kernels run wherever kernels run at all."""
    return None


def serves(call: Call, direction: Direction) -> str | None:
    """Return None: the portable kernels support every call."""
    return None


def plan_blocks(
    mask: Mask, head_dim: int, dtype: torch.dtype, rich: bool, softcap: bool
) -> tuple[int, ...]:
    """Return the six tile sizes (Plan.blocks) for a mask's plan. rich: whether calls have
    ALiBi, a bias or dropout."""
    return tile_table.plan_blocks(mask.queries.device, head_dim, dtype, rich or softcap)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Compute (out (B, Sq, H, D), lse (B, H, Sq)) of a call."""
    from .forward import forward_launch  # Triton is imported only where it is used

    call, (out, lse) = call.readied(plan_blocks), call.empty_results()
    forward_launch(call, out, lse, tile_table.tiles_of(call).forward).run()
    return out, lse


def backward(call: Call, gradients: Gradients) -> None:
    """Fill the gradient tensors dq, dk, dv and, if there is one, dbias."""
    from .backward import backward_launches
    from .dbias import dbias_launch

    call, lse = call.readied(plan_blocks), gradients.lse
    tiles = tile_table.tiles_of(call)
    # Two allocations: the second half of one may not be aligned to 16 bytes, for which
    # Triton would compile anew.
    rows = [torch.empty(lse.shape, dtype=torch.float32, device=lse.device) for _ in range(2)]
    for launch in backward_launches(call, gradients, rows, tiles):
        launch.run()
    if gradients.dbias is not None:
        dbias_launch(call, gradients.dout, rows, gradients.dbias, tiles.dbias).run()


def describe(call: Call, direction: Direction) -> str:
    """Return the call's tile sizes in one direction as text: those that a mask was planned
    for, else tile_table's."""
    tiles = tile_table.tiles_of(call)
    if direction == "forward":
        return str(tiles.forward)
    return f"dK/dV {tiles.dkdv}; dQ {tiles.dq}{' in one launch' if tiles.together else ''}"
