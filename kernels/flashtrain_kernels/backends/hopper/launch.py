"""Launches of Gluon kernels, with TMA descriptors among their arguments."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.backends.nvidia import driver
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..compiled import entry_of, map_of
from ..portable.launch import Launch


@dataclass(frozen=True)
class GluonLaunch(Launch):
    """A Gluon kernel with its grid and arguments. The kernel is compiled once for all
    values of its integer arguments (once more for those beyond int32), as Gluon kernels are
    not specialized on them."""

    def _key(self) -> tuple[Any, ...]:
        kinds = tuple(
            [
                x.data_ptr() % 16
                if isinstance(x, Tensor)
                else -(2**31) <= x < 2**31
                if isinstance(x, int)
                else None
                for x in self.args
            ]
        )
        described = tuple(
            [(x.base.dtype, *x.block_shape) for x in self.args if isinstance(x, TensorDescriptor)]
        )
        constants = tuple(self.constants.values())
        return (
            self.kernel,
            torch.cuda.current_device(),
            kinds,
            described,
            constants,
            *self.options.items(),
        )

    def _compile(self) -> Any:
        compiled = super()._compile()
        _remember_maps(compiled)
        return compiled


def _remember_maps(compiled: Any) -> None:
    """Let a compiled kernel encode the TMA map of a descriptor object once and not at
    every launch (6 us each)."""
    # Where a release builds its launcher otherwise than is known, launches stay as they are.
    entry, ordinary = entry_of(compiled), getattr(driver, "_BASE_ARGS_FORMAT_LEN", None)
    if entry is None or not entry.maps:
        return

    def expand(args: Any) -> list[Any]:
        found: list[Any] = []
        for index, arg in enumerate(args):
            if index not in entry.maps:
                found.append(arg)
                continue
            if not hasattr(arg, "encoded"):
                arg.encoded = map_of(arg, entry.maps[index])
            found.extend(arg.encoded)
        return found

    def launch_flat(*args: Any) -> Any:  # 3.6: the kernel's arguments follow the launcher's own
        return entry.launch(*args[:ordinary], *expand(args[ordinary:]))

    def launch_nested(*args: Any) -> Any:  # from 3.7 on: they come as one tuple
        return entry.launch(*args[:-1], expand(args[-1]))

    compiled.run.launch = launch_nested if ordinary is None else launch_flat
