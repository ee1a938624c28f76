"""Launching Gluon kernels, and the arguments that each takes of the mask."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...masks import BlockMask, Mask
from ..portable import launch as portable
from ..portable.launch import Launch
from .compat import remember_maps


def mask_arguments(mask: Mask | BlockMask | None, unused: Tensor, kernel: str) -> tuple[Any, ...]:
    """Mask.queries, the table of tiles, the list of blocks; the table's strides by batch row, head and tile; the
    strides of Mask.queries by batch row and number. unused: a tensor to stand for absent ones.

    kernel: "forward", "dq" or "dkdv", whose table of the plan is passed.
    """
    queries, plane, stride_rows, _, _ = portable.mask_arguments(mask, unused)
    table, stride_batch, stride_head, stride_tile, places = portable.table_arguments(mask, unused, kernel)
    return (queries, table, places, stride_batch, stride_head, stride_tile, stride_rows, plane)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


# Compiled kernels. Triton finds them itself, but looks at all the arguments for longer than a short kernel runs.
_COMPILED: dict[tuple[Any, ...], Any] = {}


def run(launch: Launch) -> None:
    """Launch, compiling where this is the first of its kind. The kernel's integers must not be specialised."""
    kinds = tuple(
        [
            x.data_ptr() % 16 if isinstance(x, Tensor) else -(2**31) <= x < 2**31 if isinstance(x, int) else None
            for x in launch.args
        ]
    )
    described = tuple([(x.base.dtype, *x.block_shape) for x in launch.args if isinstance(x, TensorDescriptor)])
    constants = tuple(launch.constants.values())
    key = (launch.kernel, torch.cuda.current_device(), kinds, described, constants, *launch.options.items())
    compiled = _COMPILED.get(key)
    if compiled is None:
        compiled = launch.kernel[launch.grid](*launch.args, **launch.constants, **launch.options)
        remember_maps(compiled)
        _COMPILED[key] = compiled
    else:
        compiled[(launch.grid[0], 1, 1)](*launch.args, *constants)
