"""One kernel launch as data, so that running it, compiling it ahead of time and tuning it share one description; and
the arguments that every kernel takes after its own tensors.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.runtime.jit import JITFunction

from ... import philox
from ...masks import BlockMask, Mask
from ...options import Options
from .tile_table import Tile

# Arguments that change from batch to batch. Triton otherwise compiles anew when one is 1 or (no) multiple of 16.
# Strides of q, k, v are left out on purpose: that they are multiples of 16 is what lets loads be 16 bytes wide.
NOT_SPECIALISED = [
    "heads", "seqlen_q", "seqlen_k", "band_left", "band_right", "threshold", "stride_slopes",
    "mask_plane", "stride_mask", "stride_positions", "stride_tb", "stride_th", "stride_tr", "stride_bb", "stride_bh",
    "bias_batches", "bias_heads", "dq_stride_tb", "dq_stride_th", "dq_stride_tr", "programs_dkdv", "programs_dq",
]  # fmt: skip


# Compiled kernels. Triton finds them itself, but looks at its sixty arguments for longer than a short kernel runs.
_COMPILED: dict[tuple[Any, ...], Any] = {}


@dataclass(frozen=True)
class Launch:
    """A Triton kernel with everything it is called with. args are positional, constants are its constexpr arguments, in
    the kernel's order."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, int]

    def run(self) -> None:
        """Launch, unless there is nothing to compute (CUDA refuses an empty grid)."""
        if self.grid[0] == 0:
            return
        if not isinstance(self.kernel, JITFunction):  # Triton's interpreter
            self.kernel[self.grid](*self.args, **self.constants, **self.options)
            return
        key = self._key()
        compiled = _COMPILED.get(key)
        if compiled is None:
            _COMPILED[key] = self.kernel[self.grid](*self.args, **self.constants, **self.options)
        else:
            grid = (*self.grid, 1, 1)[:3]
            compiled[grid](*self.args, *self.constants.values())

    def _key(self) -> tuple[Any, ...]:
        """Everything that Triton compiles a kernel anew for: what is constant, and of each argument what it could be
        specialised on (more than it is, in part: that only costs another entry).
        """
        kinds = tuple(
            [
                (arg.dtype, arg.data_ptr() % 16) if isinstance(arg, torch.Tensor)
                else 0.0 if isinstance(arg, float)
                else (arg == 1, arg % 16 == 0, -(2**31) <= arg < 2**31)
                for arg in self.args
            ]
        )  # fmt: skip
        device = torch.cuda.current_device()
        return (self.kernel, device, kinds, tuple(self.constants.values()), tuple(self.options.items()))

    def compile(self) -> None:
        """Compile into Triton's cache without launching (needs the GPU's driver)."""
        self.kernel.warmup(*self.args, grid=self.grid, **self.constants, **self.options)


def ceil_div(a: int, b: int) -> int:
    """triton.cdiv in plain Python: that one costs several microseconds a call on the host."""
    return -(-a // b)


def precision(dtype: torch.dtype, tf32: bool) -> str:
    """How `tl.dot` multiplies: float32 as three TF32 products (near float32 accuracy on tensor cores), or exactly."""
    if dtype != torch.float32:
        return "tf32"  # has no effect on 16-bit operands
    return "tf32x3" if tf32 else "ieee"


class Features(NamedTuple):
    """Compile-time switches; Triton sees it as a constexpr. Everything off is full attention.

    left, right: the band has a bound on that side. intervals: 0, or how many intervals of keys a query sees (1 or 2).
    key_positions: the mask gives the keys' positions. block_q, block_k: block sizes of a block-sparse mask, or 0.
    softcap, alibi, bias, dropout: that option is on. slope_rows: each sequence has ALiBi slopes of its own.
    """

    left: bool = False
    right: bool = False
    intervals: int = 0
    key_positions: bool = False
    block_q: int = 0
    block_k: int = 0
    softcap: bool = False
    alibi: bool = False
    slope_rows: bool = False
    bias: bool = False
    dropout: bool = False


def features_of(options: Options) -> Features:
    mask, slopes = options.mask, options.alibi_slopes
    intervals, key_positions, block_q, block_k = 0, False, 0, 0
    if isinstance(mask, Mask):
        intervals = 1 if mask.queries.shape[0] == 5 else 2
        key_positions = mask.keys is not None
    elif isinstance(mask, BlockMask):
        block_q, block_k = mask.block_size
    return Features(
        left=options.left is not None,
        right=options.right is not None,
        intervals=intervals,
        key_positions=key_positions,
        block_q=block_q,
        block_k=block_k,
        softcap=options.softcap > 0,
        alibi=slopes is not None,
        slope_rows=slopes is not None and slopes.dim() == 2 and slopes.shape[0] > 1,
        bias=options.bias is not None,
        dropout=options.dropout_p > 0,
    )


def option_arguments(
    q: torch.Tensor, k: torch.Tensor, unused: torch.Tensor, options: Options, *kernels: str
) -> tuple[Any, ...]:
    """From bias_ptr to keep_scale: what every kernel takes of the options. unused: a tensor to stand for absent ones.

    kernels: one or more of "forward", "dq" and "dkdv", whose tables of the plan are passed.
    """
    bias, slopes, mask = options.bias, options.alibi_slopes, options.mask
    bias_strides = (0, 0, 0, 0) if bias is None else broadcast_strides(bias)
    seed = unused if options.seed is None else options.seed
    log2e = math.log2(math.e)
    tables = [argument for kernel in kernels for argument in table_arguments(mask, unused, kernel)]
    return (
        unused if bias is None else bias, *bias_strides,
        unused if slopes is None else slopes,
        0 if slopes is None or slopes.dim() == 1 or slopes.shape[0] == 1 else slopes.stride(0),
        seed, *mask_arguments(mask, unused), *tables, q.shape[2], q.shape[1], k.shape[1],
        options.left or 0, options.right or 0, options.scale * log2e,
        options.scale / options.softcap if options.softcap else 0.0, options.softcap * log2e,
        philox.threshold(options.dropout_p), 1.0 / (1.0 - options.dropout_p),
    )  # fmt: skip


def broadcast_strides(x: torch.Tensor) -> tuple[int, ...]:
    """The strides, 0 along dimensions of size 1, which are broadcast."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))


def mask_arguments(mask: Mask | BlockMask | None, unused: torch.Tensor) -> tuple[Any, ...]:
    """mask_ptr, mask_plane, stride_mask, positions_ptr, stride_positions."""
    if not isinstance(mask, Mask):
        return (unused, 0, 0, unused, 0)
    one = mask.queries.shape[1] == 1
    keys = mask.keys
    return (
        mask.queries, mask.queries.stride(0), 0 if one else mask.queries.stride(1),
        unused if keys is None else keys, 0 if keys is None or one else keys.stride(0),
    )  # fmt: skip


def table_arguments(mask: Mask | BlockMask | None, unused: torch.Tensor, kernel: str) -> tuple[Any, ...]:
    """table_ptr, its three strides (batch row, head, tile) and list_ptr, of one kernel."""
    if isinstance(mask, Mask):
        if mask.plan is None:
            raise ValueError("the mask has no plan: call mask.planned(head_dim, dtype) first")
        table = getattr(mask.plan, kernel)
        return (table, 0 if mask.queries.shape[1] == 1 else table.stride(0), 0, table.stride(1), unused)
    if isinstance(mask, BlockMask):
        of_keys = kernel == "dkdv"
        rows = mask.key_rows if of_keys else mask.query_rows
        batch, head, row, _ = broadcast_strides(rows)
        return (rows, batch, head, row, mask.key_blocks if of_keys else mask.query_blocks)
    return (unused, 0, 0, 0, unused)


def call_constants(
    q: torch.Tensor, k: torch.Tensor, options: Options, tile: Tile, tf32: bool, looped_keys: bool
) -> dict[str, Any]:
    """The constexpr arguments. looped_keys: the kernel owns queries and loops over keys (else the other way round)."""
    features = features_of(options)
    block = (features.block_k // tile.block_k) if looped_keys else (features.block_q // tile.block_q)
    return {
        "F": features,
        "GROUP": q.shape[2] // k.shape[2],
        "TILES": max(1, block),
        "HEAD_DIM": q.shape[3],
        "BLOCK_D": max(16, 1 << (q.shape[3] - 1).bit_length()),
        "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k,
        "PRECISION": precision(q.dtype, tf32),
    }
