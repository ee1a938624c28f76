"""One kernel launch as data, so that running it, compiling it ahead of time and tuning it share one description."""

from dataclasses import dataclass
from typing import Any

import torch

# Arguments that change from batch to batch. Triton otherwise compiles anew when one is 1 or (no) multiple of 16.
# Strides are left out on purpose: that they are multiples of 16 is what lets loads be 16 bytes wide.
NOT_SPECIALISED = ["heads", "kv_heads", "seqlen_q", "seqlen_k"]


@dataclass(frozen=True)
class Launch:
    """A Triton kernel with everything it is called with. args are positional, constants are its constexpr arguments."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, int]

    def run(self) -> None:
        """Launch, unless there is nothing to compute (CUDA refuses an empty grid)."""
        if self.grid[0] > 0:
            self.kernel[self.grid](*self.args, **self.constants, **self.options)

    def compile(self) -> None:
        """Compile into Triton's cache without launching (needs the GPU's driver)."""
        self.kernel.warmup(*self.args, grid=self.grid, **self.constants, **self.options)


def precision(dtype: torch.dtype, tf32: bool) -> str:
    """How `tl.dot` multiplies: float32 as three TF32 products (near float32 accuracy on tensor cores), or exactly."""
    if dtype != torch.float32:
        return "tf32"  # has no effect on 16-bit operands
    return "tf32x3" if tf32 else "ieee"
