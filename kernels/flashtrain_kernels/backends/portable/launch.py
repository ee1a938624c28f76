"""Kernel launches as data, and the arguments that all attention kernels take.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from triton.runtime.jit import JITFunction

from ... import launch_cache, philox
from ...environment import INTERPRETED
from ...masks import AnyMask, BlockMask, Mask, Sequences
from ...options import Options
from .. import Call
from ..compiled import repeated
from .tile_table import Tile

# Arguments that change from batch to batch. Triton otherwise compiles anew when one is 1 or (no)
# multiple of 16. Strides of q, k, v are left out on purpose: that they are multiples of 16 is what
# lets loads be 16 bytes wide.
NOT_SPECIALISED = [
    "bias_batch", "bias_head", "slope_row", "plane", "interval_batch", "position_batch",
    "table_batch", "table_head",
    "table_row", "dq_table_batch", "dq_table_head", "dq_table_row", "heads", "seqlen_q", "seqlen_k",
    "left", "right",
    "threshold", "bias_batches", "bias_heads", "programs_dkdv", "programs_dq",
]  # fmt: skip


# As many columns of an accumulator of 128 rows as the registers of 8 warps hold.
LARGEST_COLUMNS = 256
# Compiled kernels. Triton finds them itself, but looks at its sixty arguments for longer than
# a short kernel runs.
_COMPILED: dict[tuple[Any, ...], Any] = {}


@dataclass(frozen=True)
class Launch:
    """A Triton kernel with its grid, arguments and compile options."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]  # positional: tensors, numbers, and tuples of numbers such as strides
    constants: dict[str, Any]  # constexpr arguments, in the kernel's order
    options: dict[str, int]  # how it is compiled, such as num_warps

    def run(self) -> None:
        """Launch the kernel, or let the active Recorder record it. An empty grid, which CUDA
        refuses, does nothing."""
        recorder = launch_cache.recorder()
        if 0 in self.grid:
            return
        if recorder is None:
            self.start()
        else:
            recorder.launches.append(self)

    def start(self) -> Any:
        """Launch the kernel now, compiled if necessary. Returns the compiled kernel."""
        if not isinstance(self.kernel, JITFunction):  # Triton's interpreter
            return self._compile()
        key = self._key()
        compiled = _COMPILED.get(key)
        if compiled is None:
            compiled = _COMPILED[key] = self._compile()
        else:
            grid = (*self.grid, 1, 1)[:3]
            compiled[grid](*self.args, *self.constants.values())
        return compiled

    def _compile(self) -> Any:
        """Launch the kernel as Triton does, which compiles it if necessary, and return the compiled
        kernel."""
        return self.kernel[self.grid](*self.args, **self.constants, **self.options)

    repeated = staticmethod(repeated)

    def _key(self) -> tuple[Any, ...]:
        # All that Triton compiles a kernel anew for: what is constant, and of each argument what it
        # could be specialised on (more than it is, in part: that only costs another entry).
        flat: list[Any] = []
        for arg in self.args:
            if isinstance(arg, tuple):
                flat += arg
            else:
                flat.append(arg)
        kinds = tuple(
            [
                (arg == 1, arg % 16 == 0, -(2**31) <= arg < 2**31) if isinstance(arg, int)
                else 0.0 if isinstance(arg, float)
                else (arg.dtype, arg.data_ptr() % 16)
                for arg in flat
            ]
        )  # fmt: skip
        device = torch.cuda.current_device()
        return (
            self.kernel,
            device,
            kinds,
            tuple(self.constants.values()),
            tuple(self.options.items()),
        )


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up. (triton.cdiv takes several microseconds a call on the host.)"""
    return -(-a // b)


class Features(NamedTuple):
    """Compile-time switches of an attention kernel, a constexpr; all off is full attention."""

    left: bool = False  # the band has a bound on that side
    right: bool = False
    intervals: int = 0  # how many intervals of keys a query of a Mask sees (1 or 2)
    key_positions: bool = False  # the mask gives the keys' positions
    block_q: int = 0  # block sizes of a block-sparse mask
    block_k: int = 0
    softcap: bool = False
    alibi: bool = False
    slope_rows: bool = False  # each sequence has ALiBi slopes of its own
    bias: bool = False
    dropout: bool = False


def features_of(options: Options) -> Features:
    """Return the compile-time switches (Features) of a call with these options."""
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


class Tiling(NamedTuple):
    """Compile-time sizes of an attention kernel, a constexpr: tiles, D and Dv padded,
    H / K, and tl.dot's precision."""

    group: int  # H / K
    tiles: int  # looped tiles in a block of a block-sparse mask
    head_dim: int
    block_d: int  # D padded to a power of two
    value_dim: int  # Dv
    columns: int  # how many of them a program takes: Dv, or LARGEST_COLUMNS of more
    block_v: int  # columns padded to a power of two
    block_q: int
    block_k: int
    precision: str  # how `tl.dot` multiplies float32
    apart: bool = False  # see tiles.outer
    gradient: str = ""  # what the kernel of dK and dV computes, "dk" or "dv"; else both


def tiling_of(
    call: Call, features: Features, tile: Tile, looped_keys: bool, columns: int | None = None
) -> Tiling:
    """Return the Tiling of a call. looped_keys: a program holds queries and loops over
    keys, else the reverse; columns: how many of V a program takes (None: all)."""
    q, k, value_dim = call.q, call.k, call.v.shape[3]
    columns = value_dim if columns is None else columns
    block = (
        (features.block_k // tile.block_k) if looped_keys else (features.block_q // tile.block_q)
    )
    return Tiling(
        group=q.shape[2] // k.shape[2],
        tiles=max(1, block),
        head_dim=q.shape[3],
        block_d=padded(q.shape[3]),
        value_dim=value_dim,
        columns=columns,
        block_v=padded(columns),
        block_q=tile.block_q,
        block_k=tile.block_k,
        precision=precision_of(q.dtype),
        # With a bias Triton 3.7 cannot compile it.
        apart=q.shape[3] > 256
        and not features.bias
        and (tile.block_q if looped_keys else tile.block_k) < 16 * tile.warps,
    )


def padded(head_dim: int) -> int:
    """Return the head dimension padded to a power of two, at least 16, as tl.dot requires."""
    return max(16, 1 << (head_dim - 1).bit_length())


def precision_of(dtype: torch.dtype) -> str:
    """Return tl.dot's input_precision; for float32 three TF32 products, near float32
    accuracy (interpreter: exact)."""
    return ("ieee" if INTERPRETED else "tf32x3") if dtype == torch.float32 else "tf32"


def strides_of(x: torch.Tensor) -> tuple[int, ...]:
    """Return the (batch, row, head) strides of a (B, S, heads, D) tensor,
    whose last stride is 1."""
    return x.stride()[:3]


# Triton specialises on numbers in a tuple, whatever do_not_specialize says. On strides it may; the
# members of Arguments and Table are therefore passed one by one, and a kernel's first lines put
# them together again.
class Arguments(NamedTuple):
    """The arguments that all attention kernels share, besides their own tensors and their Table."""

    bias: Any
    bias_batch: Any  # its strides: by batch row, head, query and key
    bias_head: Any
    bias_q: Any
    bias_k: Any
    slopes: Any  # ALiBi's
    slope_row: Any  # from a sequence's slopes to the next one's
    seed: Any  # dropout's
    intervals: Any  # Mask.queries
    plane: Any  # the stride of its rows
    interval_batch: Any  # and that of its batch
    positions: Any  # Mask.keys
    position_batch: Any
    heads: Any  # H
    seqlen_q: Any
    seqlen_k: Any
    left: Any  # the band
    right: Any
    scale_log2: Any  # what makes products scores in base 2
    cap_in: Any  # what softcap's tanh is taken of, divided by the product
    cap_log2: Any  # the softcap in base 2
    threshold: Any  # dropout's
    keep_scale: Any  # what the kept weights are multiplied by

    def with_tables(self, tables: tuple[Any, ...]) -> list[Any]:
        """Return the arguments in the kernels' order, with `tables`, the fields of 1 or 2
        Tables, before `heads`."""
        return [*self[:_TABLES_AT], *tables, *self[_TABLES_AT:]]


_TABLES_AT = Arguments._fields.index("heads")


class Table(NamedTuple):
    """Pointers to the list of tiles that each program of a kernel visits, and
    the list's strides."""

    rows: Any  # of a plan or of a list of blocks
    batch: Any  # their strides: by batch row, head and tile
    head: Any
    row: Any
    blocks: Any  # the list


def arguments_of(call: Call, unused: torch.Tensor) -> Arguments:
    """Return the Arguments of a call. unused: any tensor, passed in place of absent ones."""
    q, k, _, options = call
    bias, slopes, mask = options.bias, options.alibi_slopes, options.mask
    log2e = math.log2(math.e)
    return Arguments(
        unused if bias is None else bias,
        *((0, 0, 0, 0) if bias is None else broadcast_strides(bias)),
        unused if slopes is None else slopes, slope_row(slopes),
        unused if options.seed is None else options.seed,
        *mask_arguments(mask, unused), q.shape[2], q.shape[1], k.shape[1],
        options.left or 0, options.right or 0, options.scale * log2e,
        options.scale / options.softcap if options.softcap else 0.0, options.softcap * log2e,
        philox.threshold(options.dropout_p), 1.0 / philox.keep_probability(options.dropout_p),
    )  # fmt: skip


def slope_row(slopes: torch.Tensor | None) -> int:
    """Return the stride between two sequences' ALiBi slopes; 0 if all sequences
    share the same slopes."""
    return 0 if slopes is None or slopes.dim() == 1 or slopes.shape[0] == 1 else slopes.stride(0)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of the GPU; without a GPU 132, as on a Hopper GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 132


def broadcast_strides(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the strides of a 4-dimensional tensor, with 0 for dimensions of size 1,
    so that they broadcast."""
    a, b, c, d = [
        0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)
    ]
    return a, b, c, d


def mask_arguments(mask: AnyMask | None, unused: torch.Tensor) -> tuple[Any, int, int, Any, int]:
    """Return Arguments' intervals (Mask.queries), plane, interval_batch, positions (Mask.keys) and
    position_batch. For Sequences `plane` is N, the number of sequences."""
    if isinstance(mask, Sequences):
        return (unused, mask.number, 0, unused, 0)
    if not isinstance(mask, Mask):
        return (unused, 0, 0, unused, 0)
    one = mask.queries.shape[1] == 1
    keys = mask.keys
    return (
        mask.queries, mask.queries.stride(0), 0 if one else mask.queries.stride(1),
        unused if keys is None else keys, 0 if keys is None or one else keys.stride(0),
    )  # fmt: skip


def table_of(mask: AnyMask | None, unused: torch.Tensor, kernel: str) -> Table:
    """Return the Table of the tiles that kernel "forward", "dq" or "dkdv" visits; for packed
    Sequences a Table whose rows and blocks are cu_seqlens of keys and of queries."""
    if isinstance(mask, Sequences):
        return Table(mask.cu_seqlens_k, 0, 0, 0, mask.cu_seqlens_q)
    if isinstance(mask, Mask):
        if mask.plan is None:
            raise ValueError("the mask has no plan: call mask.planned(head_dim, dtype) first")
        table = getattr(mask.plan, kernel)
        return Table(
            table, 0 if mask.queries.shape[1] == 1 else table.stride(0), 0, table.stride(1), unused
        )
    if isinstance(mask, BlockMask):
        of_keys = kernel == "dkdv"
        rows = mask.key_rows if of_keys else mask.query_rows
        return Table(
            rows, *broadcast_strides(rows)[:3], mask.key_blocks if of_keys else mask.query_blocks
        )
    return Table(unused, 0, 0, 0, unused)
