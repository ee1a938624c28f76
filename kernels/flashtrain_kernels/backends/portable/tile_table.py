"""The table of tile sizes for the portable kernels, and the rules to read it.
Nothing is tuned at run time."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from ... import environment
from ...environment import constant
from ...masks import BlockMask, Mask
from .. import Call

# (architecture, bits of the dtype, head dimension up to), as in the table.
Key = tuple[str, int, int]
SHORT = 1024
# Where an architecture has no row of its own it borrows this one's.
_BORROWS = {("sm_100", 16): "sm_90", ("sm_100", 32): "sm_90", ("sm_80", 32): "small"}


class Tile(NamedTuple):
    """The tile size and compile options of one kernel."""

    block_q: int  # queries a step
    block_k: int  # keys a step
    warps: int
    stages: int  # loads kept in flight
    registers: int = 0  # a cap on those of a thread; 0: none

    def options(self) -> dict[str, int]:
        """Return Triton's launch options. A cap on registers lets more programs
        run on a multiprocessor."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return {**options, "maxnreg": self.registers} if self.registers else options

    def __str__(self) -> str:
        cap = f", {self.registers} registers" if self.registers else ""
        return f"{self.block_q}x{self.block_k}, {self.warps} warps, {self.stages} stages{cap}"


class Tiles(NamedTuple):
    """The tile sizes and compile options of all attention kernels for one call."""

    forward: Tile
    dkdv: Tile
    dq: Tile
    dbias: Tile  # small: its kernel also adds up a tile of scores
    together: bool = False  # dK/dV and dQ in one launch, whose options are those of the dkdv tile
    # For wide heads: dK and dV in a launch each, as both would not fit the registers. This tile's
    # options are of dV's, `dkdv` is dK's; their sizes are the same, for the plan of a mask.
    dv: Tile | None = None

    @classmethod
    def all(cls, tile: Tile, together: bool, wide: bool = False) -> "Tiles":
        """Return Tiles with the same `tile` for every kernel. together: dK/dV and dQ are
        computed in one launch; wide: heads are wider than 256, which need one for each."""
        return cls(tile, tile, tile, tile, together and not wide, tile if wide else None)

    def mapped(self, change: Callable[[Tile], Tile]) -> "Tiles":
        """Return Tiles with `change` applied to every tile."""
        return Tiles(
            change(self.forward),
            change(self.dkdv),
            change(self.dq),
            change(self.dbias),
            self.together,
            None if self.dv is None else change(self.dv),
        )


class Kind(NamedTuple):
    """Properties of a call that decide its tile sizes, besides device, head dimension
    and dtype. See VARIANTS."""

    short: bool = False
    short_causal: bool = False
    window: bool = False
    blocks: bool = False
    intervals: bool = False
    scattered: bool = False
    permuted: bool = False
    grouped: bool = False
    grouped_blocks: bool = False
    rich: bool = False
    rich_blocks: bool = False


# (architecture, bits of the dtype, head dimension up to) -> tiles. "small": GPUs with 99 KiB of
# shared memory a block (sm_86, sm_89, sm_120), and all not named. `python
# kernels/dev/tuning.py` prints such rows.
TILES: dict[Key, Tiles] = {
    ("sm_90", 16, 64): Tiles(
        Tile(128, 64, 4, 4), Tile(32, 64, 4, 3, 168), Tile(64, 64, 4, 3, 168), Tile(64, 32, 8, 1)
    ),
    ("sm_90", 16, 128): Tiles(
        Tile(128, 64, 8, 3),
        Tile(32, 128, 8, 3),
        Tile(128, 64, 8, 3),
        Tile(64, 32, 8, 1),
        together=True,
    ),
    ("sm_90", 16, 256): Tiles(
        Tile(128, 64, 8, 2), Tile(32, 64, 8, 2), Tile(128, 32, 8, 2), Tile(64, 32, 8, 1)
    ),
    ("sm_90", 16, 512): Tiles(
        Tile(128, 32, 8, 2), Tile(32, 64, 8, 1), Tile(64, 64, 8, 1), Tile(32, 16, 8, 1),
        dv=Tile(32, 64, 8, 2),
    ),
    ("sm_90", 32, 64): Tiles(
        Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)
    ),
    ("sm_90", 32, 128): Tiles(
        Tile(32, 32, 4, 2), Tile(16, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)
    ),
    ("sm_90", 32, 256): Tiles(
        Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)
    ),
    ("sm_90", 32, 512): Tiles(
        Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1),
        dv=Tile(16, 16, 8, 1),
    ),
    ("sm_100", 16, 64): Tiles(
        Tile(128, 64, 8, 3), Tile(32, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 32, 8, 1)
    ),
    ("sm_100", 16, 128): Tiles(
        Tile(128, 64, 8, 3), Tile(32, 128, 8, 3), Tile(128, 64, 8, 2), Tile(64, 32, 8, 1)
    ),
    ("sm_80", 16, 64): Tiles(
        Tile(128, 64, 8, 3), Tile(32, 128, 8, 3), Tile(64, 64, 4, 2), Tile(32, 64, 8, 1)
    ),
    ("sm_80", 16, 128): Tiles(
        Tile(128, 32, 8, 3), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 1)
    ),
    ("sm_80", 16, 256): Tiles(
        Tile(64, 32, 8, 2), Tile(16, 64, 8, 1), Tile(64, 16, 8, 1), Tile(64, 16, 8, 1)
    ),
    ("sm_80", 16, 512): Tiles(
        Tile(64, 32, 8, 1), Tile(16, 32, 8, 1), Tile(32, 16, 8, 1), Tile(32, 16, 8, 1),
        dv=Tile(16, 32, 8, 1),
    ),
    ("small", 16, 64): Tiles(
        Tile(128, 32, 4, 2), Tile(64, 128, 8, 2), Tile(64, 64, 4, 2), Tile(32, 64, 8, 1)
    ),
    ("small", 16, 128): Tiles(
        Tile(64, 64, 4, 2), Tile(32, 64, 8, 1), Tile(64, 32, 8, 1), Tile(32, 64, 8, 1)
    ),
    ("small", 16, 256): Tiles(
        Tile(32, 32, 4, 1), Tile(16, 32, 8, 1), Tile(32, 16, 8, 1), Tile(32, 16, 8, 1)
    ),
    ("small", 16, 512): Tiles(
        Tile(32, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1),
        dv=Tile(16, 16, 8, 1),
    ),
    ("small", 32, 64): Tiles(
        Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)
    ),
    ("small", 32, 128): Tiles(
        Tile(32, 32, 8, 1), Tile(16, 32, 8, 1), Tile(32, 16, 8, 1), Tile(32, 16, 8, 1)
    ),
    ("small", 32, 256): Tiles(
        Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)
    ),
    ("small", 32, 512): Tiles(
        Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1),
        dv=Tile(16, 16, 8, 1),
    ),
}  # fmt: skip
# What replaces a tile of a row above when a call is more than plain, where that is faster or the
# row's tile would spill registers: "short", "short_causal": at most SHORT keys, without and with a
# bound on the right; "window": a band with a left bound; "blocks": a block-sparse mask;
# "intervals": a Mask; "scattered": one with two intervals a query or with key positions;
# "permuted": one with key positions; "grouped": several query heads a key head; "grouped_blocks":
# that with a block-sparse mask; "rich": softcap, ALiBi, bias or dropout. A call that is several of
# these takes the last one's. A mask's plan is made for the sizes of "intervals", and of "rich"
# where the call is that too.
VARIANTS: dict[Key, dict[str, dict[str, Any]]] = {
    ("sm_90", 16, 64): {
        "short": {"forward": Tile(128, 64, 4, 3)},
        "short_causal": {"forward": Tile(64, 64, 4, 2)},
        "window": {"forward": Tile(64, 64, 4, 3)},
        "intervals": {"forward": Tile(64, 64, 4, 3), "together": True},
        "grouped": {"dkdv": Tile(32, 64, 4, 3), "together": True},
        "rich": {
            "forward": Tile(128, 64, 8, 2),
            "dkdv": Tile(32, 64, 4, 2),
            "dq": Tile(64, 64, 4, 2),
            "together": False,
        },
    },
    ("sm_90", 16, 128): {
        "short_causal": {"forward": Tile(64, 64, 4, 3)},
        "window": {"forward": Tile(64, 64, 4, 3)},
        "blocks": {"forward": Tile(64, 64, 4, 3)},
        "intervals": {"forward": Tile(64, 64, 4, 3)},
        "grouped_blocks": {"dkdv": Tile(32, 64, 8, 3)},
        "rich": {
            "forward": Tile(128, 32, 8, 2),
            "dkdv": Tile(16, 128, 8, 3),
            "dq": Tile(128, 32, 8, 2),
            "together": False,
        },
    },
    ("sm_90", 16, 512): {
        "rich": {
            "forward": Tile(64, 32, 8, 1),
            "dkdv": Tile(16, 64, 8, 1),
            "dq": Tile(64, 16, 8, 1),
            "dv": Tile(16, 64, 8, 2),
        }
    },
    ("sm_100", 16, 64): {
        "rich": {
            "forward": Tile(128, 32, 8, 2),
            "dkdv": Tile(32, 64, 8, 2),
            "dq": Tile(64, 64, 4, 2),
        },
        "rich_blocks": {"forward": Tile(128, 32, 8, 1)},  # with two stages 3.7 spills; not timed
    },
    ("sm_100", 16, 128): {
        "grouped": {"dkdv": Tile(32, 128, 8, 1)},
        "rich": {
            "forward": Tile(64, 32, 8, 2),
            "dkdv": Tile(32, 128, 8, 2),
            "dq": Tile(64, 32, 4, 2),
        },
    },
    ("sm_80", 16, 64): {
        "rich": {
            "forward": Tile(128, 32, 8, 3),
            "dkdv": Tile(32, 128, 8, 2),
            "dq": Tile(64, 32, 4, 3),
        }
    },
    ("sm_80", 16, 128): {"rich": {"forward": Tile(64, 32, 8, 3), "dkdv": Tile(16, 64, 8, 2)}},
}
_INTERPRETER_TILE = Tile(64, 64, 4, 1)
# Releases of Triton that would spill registers with the tiles above get the nearest tiles that
# do not, found by compiling ahead of time (tests/kernels/compile_cases.py) and never timed:
# OLDEST for 3.6, NEWEST from 3.9 on. key -> kind of call ("plain": any) -> what to replace:
# tiles, as Tile has them.
OLDEST: dict[Key, dict[str, dict[str, Any]]] = {
    ("sm_90", 16, 64): {"scattered": {"dkdv": (32, 64, 4, 3)}},
    ("sm_90", 16, 128): {"permuted": {"forward": (64, 64, 8, 3)}},
    ("sm_100", 16, 64): {"rich": {"dq": (64, 64, 8, 2)}},
    ("sm_100", 16, 128): {
        "plain": {"dq": (128, 64, 8, 2, 255)},
        "rich": {"forward": (64, 32, 8, 2, 255)},
    },
    ("sm_80", 16, 64): {"grouped": {"dkdv": (32, 128, 8, 1)}, "rich": {"dkdv": (32, 128, 8, 1)}},
    ("sm_80", 16, 128): {"rich": {"dkdv": (16, 32, 8, 2)}},
}
NEWEST: dict[Key, dict[str, dict[str, Any]]] = {
    ("sm_90", 16, 64): {
        "plain": {"forward": (128, 64, 4, 2), "dkdv": (32, 64, 4, 3)},
        "short": {"forward": (128, 64, 4, 2)},
        "blocks": {"forward": (128, 64, 4, 4)},
        "rich": {"forward": (128, 64, 8, 2, 255)},
    },
    ("sm_90", 16, 128): {
        "intervals": {"forward": (64, 64, 8, 3), "dkdv": (16, 128, 8, 3)},
        "scattered": {"dkdv": (16, 128, 8, 2)},
        "rich": {"forward": (128, 32, 8, 1)},
    },
    ("sm_100", 16, 64): {
        "grouped": {"dkdv": (32, 64, 4, 3, 255)},
        "rich": {"dkdv": (32, 64, 8, 2, 255), "dq": (64, 64, 4, 1)},
    },
    ("sm_80", 16, 64): {"scattered": {"dq": (64, 64, 4, 1)}},
}


def kind_of(call: Call) -> Kind:
    """Return the Kind of a call: causal, windowed, masked, grouped-query, with ALiBi and so on."""
    q, k, _, options = call
    mask = options.mask
    band = mask is None and k.shape[1] <= SHORT
    return Kind(
        short=band and options.right is None,
        short_causal=band and options.right is not None,
        window=options.left is not None,
        blocks=isinstance(mask, BlockMask),
        intervals=isinstance(mask, Mask),
        scattered=isinstance(mask, Mask) and (mask.keys is not None or mask.queries.shape[0] > 5),
        permuted=isinstance(mask, Mask) and mask.keys is not None,
        grouped=q.shape[2] != k.shape[2],
        grouped_blocks=q.shape[2] != k.shape[2] and isinstance(mask, BlockMask),
        rich=options.rich,
        rich_blocks=options.rich and isinstance(mask, BlockMask),
    )


def tiles_of(call: Call) -> Tiles:
    """Return the tile sizes of all kernels for a call on its device, from the table."""
    q, mask = call.q, call.options.mask
    tiles = _tiles_for(q.device, q.shape[3], q.dtype, kind_of(call))
    if isinstance(mask, Mask) and mask.plan is not None:  # the sizes that it was made for stay
        tiles = resized(tiles, mask.plan.blocks)
    if isinstance(mask, BlockMask):  # no tile may be larger than a block
        most_q, most_k = mask.block_size
        tiles = tiles.mapped(
            lambda tile: _sized(tile, min(tile.block_q, most_q), min(tile.block_k, most_k))
        )
    return tiles


def _tiles_for(device: torch.device, head_dim: int, dtype: torch.dtype, kind: Kind) -> Tiles:
    forced = environment.forced
    if forced is not None and forced.tile is not None:
        return Tiles.all(forced.tile, forced.together, head_dim > 256)
    if device.type != "cuda":
        return Tiles.all(_INTERPRETER_TILE, True, head_dim > 256)
    return table_row(architecture(torch.cuda.get_device_capability(device)), head_dim, dtype, kind)


def resized(tiles: Tiles, blocks: tuple[int, ...]) -> Tiles:
    """Return tiles with the sizes that a mask's plan was made for (Plan.blocks); warps
    and stages stay the same."""
    return tiles._replace(
        forward=_sized(tiles.forward, *blocks[0:2]),
        dq=_sized(tiles.dq, *blocks[2:4]),
        dkdv=_sized(tiles.dkdv, *blocks[4:6]),
        dv=None if tiles.dv is None else _sized(tiles.dv, *blocks[4:6]),
    )


def _sized(tile: Tile, block_q: int, block_k: int) -> Tile:
    return tile._replace(block_q=block_q, block_k=block_k)


def plan_blocks(
    device: torch.device, head_dim: int, dtype: torch.dtype, rich: bool = False
) -> tuple[int, ...]:
    """Return tile sizes for a mask's plan (Plan.blocks). rich: the calls have softcap,
    ALiBi, a bias or dropout."""
    return _plan_blocks(device, width_of(head_dim), dtype, rich)


@constant  # torch.compile may neither look for a GPU nor trace through the table
def _plan_blocks(
    device: torch.device, head_dim: int, dtype: torch.dtype, rich: bool
) -> tuple[int, ...]:
    tiles = _tiles_for(device, head_dim, dtype, Kind(intervals=True, rich=rich))
    return (*tiles.forward[:2], *tiles.dq[:2], *tiles.dkdv[:2])


def width_of(head_dim: int) -> int:
    """Return the head dimension rounded up to 64, 128, 256 or 512, as in the table
    and the Hopper kernels."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256 if head_dim <= 256 else 512


@cache
def table_row(arch: str, head_dim: int, dtype: torch.dtype, kind: Kind = Kind()) -> Tiles:  # noqa: B008 - immutable
    """Return the table's tiles for an architecture, a head dimension (1 to 512), a
    dtype and a kind of call."""
    bits = dtype.itemsize * 8
    padded = width_of(head_dim)
    key = (arch, bits, padded)
    if key not in TILES:
        key = (_BORROWS[arch, bits], bits, padded)
    tiles = TILES[key]
    for name, applies in (("plain", True), *kind._asdict().items()):
        if applies:
            tiles = tiles._replace(**VARIANTS.get(key, {}).get(name, {}))
            other = _replacements(key, name)
            fitted: dict[str, Any] = {
                k: Tile(*v) if isinstance(v, tuple) else v for k, v in other.items()
            }
            tiles = tiles._replace(**fitted)
    return tiles


def architecture(capability: tuple[int, int]) -> str:
    """Return the table's name for a compute capability, such as "sm_90"."""
    named = {(8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100"}
    return named.get(capability, "small")


def _replacements(key: Key, kind: str) -> dict[str, Any]:
    """Return the fields of the table's tiles that the installed release of Triton needs changed for
    a kind of call, with their values."""
    installed = environment.release()
    table = OLDEST if installed == (3, 6) else NEWEST if installed >= (3, 9) else {}
    return table.get(key, {}).get(kind, {})
