"""Launching Gluon kernels, and the arguments that each takes of the mask."""

import contextlib
import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.backends.nvidia import driver
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...masks import BlockMask, Mask
from ..portable import launch as portable
from ..portable.launch import Launch


def mask_arguments(mask: Mask | BlockMask | None, unused: Tensor, kernel: str) -> tuple[Any, ...]:
    """Mask.queries, the table of tiles, the list of blocks; the table's strides by batch row, head and tile; the
    strides of Mask.queries by batch row and number. unused: a tensor to stand for absent ones.

    kernel: "forward", "dq" or "dkdv", whose table of the plan is passed.
    """
    queries, plane, stride_rows, _, _ = portable.mask_arguments(mask, unused)
    table = portable.table_of(mask, unused, kernel)
    return (queries, table.rows, table.blocks, table.batch, table.head, table.row, stride_rows, plane)


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
        _remember_maps(compiled)
        _COMPILED[key] = compiled
    else:
        compiled[(launch.grid[0], 1, 1)](*launch.args, *constants)


def _remember_maps(compiled: Any) -> None:
    """Let a compiled kernel encode the TMA map of a descriptor object once and not at every launch (6 us each).

    Triton's launcher is a closure around the one that wants encoded maps. Where a release builds it otherwise, launches
    stay as they are.
    """
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
        inner = compiled.run.launch
        names = inspect.getclosurevars(inner).nonlocals
        launcher, indices, metas = names["launcher"], sorted(names["tensordesc_indices"]), names["tensordesc_meta"]
        encode, ordinary = driver.make_tensordesc_arg, getattr(driver, "_BASE_ARGS_FORMAT_LEN", None)
        meta_of = dict(zip(indices, metas, strict=True))

        def expand(args: Any) -> list[Any]:
            found: list[Any] = []
            for index, arg in enumerate(args):
                if index not in meta_of:
                    found.append(arg)
                    continue
                if not hasattr(arg, "encoded"):
                    arg.encoded = encode(arg, meta_of[index])
                found.extend(arg.encoded)
            return found

        def launch_flat(*args: Any) -> Any:  # 3.6: the kernel's arguments follow the launcher's own
            return launcher(*args[:ordinary], *expand(args[ordinary:]))

        def launch_nested(*args: Any) -> Any:  # 3.7: they come as one tuple
            return launcher(*args[:-1], expand(args[-1]))

        compiled.run.launch = launch_nested if ordinary is None else launch_flat
