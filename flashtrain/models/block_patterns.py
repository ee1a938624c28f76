"""Block-sparse attention of a model: the pattern by name, and its lists as buffers that move with the module.

Rows of an image one after the other make poor blocks: a block is a strip of one row, and what lies above it is far away
in the sequence. The patterns of tiles take the pixels tile by tile; every pixel still is a token with its own place.

S sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError, unknown
from flashtrain_kernels import BlockMask, block_mask, block_sparse

DENSE = "dense"
BLOCK = 128  # queries and keys of a block: what the kernels of sm_90 take in both directions


def _butterfly(blocks: int, local: int, globals: int) -> Tensor:
    return block_sparse.butterfly(blocks, device="cpu")


def _local_global(blocks: int, local: int, globals: int) -> Tensor:
    return block_sparse.local_global(blocks, blocks, local=local, globals=globals, device="cpu")


def _both(blocks: int, local: int, globals: int) -> Tensor:
    return _butterfly(blocks, local, globals) | _local_global(blocks, local, globals)


_PATTERNS: dict[str, Callable[[int, int, int], Tensor]] = {
    "butterfly": _butterfly,
    "local-global": _local_global,
    "butterfly-local-global": _both,
}
TILED = ("tiles", "butterfly-tiles")
PATTERNS = (DENSE, *_PATTERNS, *TILED)


def tile_of(block: int) -> tuple[int, int]:
    """(height, width) in pixels of the tile that is one block: 8 x 16 of 128; the width is the height or twice it."""
    height = 1 << ((block.bit_length() - 1) // 2)
    return height, block // height


def check_tiles(side: int, block: int) -> None:
    """UserError when tiles of `block` pixels do not fill a square image."""
    height, width = tile_of(block)
    if side % width:
        raise UserError(
            f"tiles of {height} x {width} pixels in an image of side {side}. Possible: sides that {width} divides."
        )


def tile_order(side: int, block: int) -> Tensor:
    """(side * side,) int64: the numbers, in raster order, of a square image's pixels taken tile by tile.

    UserError: a side that the tile does not divide.
    """
    check_tiles(side, block)
    height, width = tile_of(block)
    pixels = torch.arange(side * side, device="cpu").view(side // height, height, side // width, width)
    return pixels.permute(0, 2, 1, 3).reshape(-1)


def near_tiles(side: int, block: int, local: int, globals: int) -> Tensor:
    """(T, T) bool of T tiles: true for tiles up to `local` tile widths apart in both directions, and for the first
    `globals` tiles with all."""
    height, width = tile_of(block)
    number = torch.arange((side // height) * (side // width), device="cpu")
    row, column = number // (side // width), number % (side // width)
    near = ((row[:, None] - row).abs() * height <= local * width) & ((column[:, None] - column).abs() <= local)
    near[:globals] = True
    near[:, :globals] = True
    return near


class BlockPattern(nn.Module):
    """Which blocks of tokens see each other, both ways, in every layer and head (Dao et al. 2022, section 3.3).

    name: "butterfly" (block i sees those whose numbers differ in one binary digit), "local-global" (the `local`
    nearest blocks on each side, and the first `globals` blocks, which see all and are seen by all), or both together;
    "tiles" (of a square image: blocks are tiles, `order` says which pixels, and each sees those within `local` tile
    widths in both directions and the first `globals`), "butterfly-tiles".
    length: S. side: of the image, for tiles. block: tokens of a block, a power of two from 16.
    UserError for anything else.
    """

    order: Tensor | None  # (S,) int64: the pixel that each token is; None: as they come
    places: Tensor | None  # (S,) int64: the token that each pixel is

    def __init__(
        self, name: str, length: int, *, block: int = BLOCK, local: int = 1, globals: int = 1, side: int | None = None
    ) -> None:
        super().__init__()
        if name not in PATTERNS or name == DENSE:
            raise unknown("attention pattern", name, PATTERNS)
        if block not in (16, 32, 64, 128, 256, 512, 1024):
            raise UserError(f"blocks of {block} tokens. Possible: 16, 32, 64, 128, 256, 512, 1024.")
        if local < 0 or globals < 0:
            raise UserError(f"{local} local and {globals} global blocks. Possible: 0 or more of each.")
        self.name = name
        order = None
        if name in TILED:
            if side is None or side * side != length:
                raise UserError(
                    f"attention pattern {name} for {length} tokens and side {side}. Possible: square images."
                )
            order = tile_order(side, block)
            sees = near_tiles(side, block, local, globals)[None]
            if name == "butterfly-tiles":
                sees = sees | _butterfly(sees.shape[-1], local, globals)
        else:
            sees = _PATTERNS[name](-(-length // block), local, globals)
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("places", None if order is None else order.argsort(), persistent=False)
        made = block_mask(sees, block_size=block, seqlen_q=length, seqlen_k=length)
        self.density = made.density()
        self._block, self._length = block, length
        for field in BlockMask._fields[:4]:
            self.register_buffer(field, getattr(made, field), persistent=False)

    def forward(self) -> BlockMask:
        """The pattern's lists, on the module's device."""
        size = (self._block, self._block)
        lists = (self.query_rows, self.query_blocks, self.key_rows, self.key_blocks)
        return BlockMask(*lists, size, self._length, self._length, None, None)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return f"{self.name}, density={self.density:.3f}"
