"""Block-sparse patterns of a classifier's attention: which blocks of tokens see each other.

Shapes: S sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError, at_least
from flashtrain_kernels import BlockMask, block_mask, block_sparse

DENSE = "dense"
TILED = ("tiles", "butterfly-tiles")
PATTERNS = (DENSE, "butterfly", "local-global", "butterfly-local-global", *TILED)
# Queries and keys of a block: the size that the sm_90 kernels support in both directions.
BLOCK = 128


def tile_of(block: int) -> tuple[int, int]:
    """Return (height, width) in pixels of a tile of `block` pixels, such as (8, 16) for 128."""
    height = 1 << ((block.bit_length() - 1) // 2)
    return height, block // height


def check_tiles(side: int, block: int) -> None:
    """Raise UserError unless tiles of `block` pixels fill a square image of this side."""
    height, width = tile_of(block)
    if side % width:
        raise UserError(
            f"side={side} with tiles of {height} x {width} pixels: "
            f"expected a side that is a multiple of {width}."
        )


def tile_order(side: int, block: int) -> Tensor:
    """Return the raster numbers of a square image's pixels in the order of
    tiles, (side * side,) int64."""
    check_tiles(side, block)
    height, width = tile_of(block)
    return block_sparse.tile_order((1, side, side), (1, height, width))


def near_tiles(side: int, block: int, local: int, globals: int) -> Tensor:
    """Compute which tiles see each other: tiles that are near vertically and horizontally,
    and global ones with all.

    Args:
        side: The side of the square image, in pixels.
        block: The number of pixels in a tile.
        local: The distance up to which tiles are near, in tile widths.
        globals: The number of first tiles that see all tiles and are seen by all.

    Returns:
        A symmetric matrix (tiles, tiles) bool.
    """
    height, width = tile_of(block)
    number = torch.arange((side // height) * (side // width), device="cpu")
    row, column = number // (side // width), number % (side // width)
    near = ((row[:, None] - row).abs() * height <= local * width) & (
        (column[:, None] - column).abs() <= local
    )
    near[:globals] = True
    near[:, :globals] = True
    return near


class BlockPattern(nn.Module):
    """The blocks of tokens that see each other, the same in every layer and head (Dao et
    al. 2022, section 3.3).

    A block of consecutive raster pixels is a strip of one row, far in the sequence from the pixels
    above it. Patterns of tiles therefore order the pixels tile by tile.

    Args:
        name: "butterfly" (block i sees those whose numbers differ in one binary digit),
            "local-global", "butterfly-local-global" (both), "tiles" (local-global with the tiles of
            a square image as blocks), or "butterfly-tiles".
        length: The number of tokens in a sequence, S.
        block: The number of tokens in a block, a power of two from 16 to 1,024.
        local: How many neighbouring blocks on each side a block sees; with tiles, the
            distance in tile widths.
        globals: The number of first blocks, which see all blocks and are seen by all.
        side: The side of the square image in pixels, for tiles.

    Raises:
        UserError: A size is not supported.
    """

    order: Tensor | None  # (S,) int64: the pixel of each token (None: raster order)
    places: Tensor | None  # (S,) int64: the token of each pixel

    def __init__(
        self,
        name: str,
        length: int,
        *,
        block: int = BLOCK,
        local: int = 1,
        globals: int = 1,
        side: int | None = None,
    ) -> None:
        super().__init__()
        if block not in (16, 32, 64, 128, 256, 512, 1024):
            raise UserError(f"pattern_block={block}: expected 16, 32, 64, 128, 256, 512 or 1024.")
        at_least("local", local, 0)
        at_least("globals", globals, 0)
        self.name = name
        blocks, order = -(-length // block), None
        sees = torch.zeros(1, blocks, blocks, dtype=torch.bool, device="cpu")
        if name in TILED:
            assert side is not None
            order = tile_order(side, block)
            sees |= near_tiles(side, block, local, globals)
        if "local-global" in name:
            near = {"local": local, "globals": globals}
            sees |= block_sparse.local_global(blocks, blocks, **near, device="cpu")
        if "butterfly" in name:
            sees |= block_sparse.butterfly(blocks, device="cpu")
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("places", None if order is None else order.argsort(), persistent=False)
        made = block_mask(sees, block_size=block, seqlen_q=length, seqlen_k=length)
        self.density = made.density()  # the share of the pairs of blocks that see each other
        self._block, self._length = block, length
        for field in BlockMask._fields[:4]:
            self.register_buffer(field, getattr(made, field), persistent=False)

    def forward(self) -> BlockMask:
        """Return the pattern as a BlockMask on the module's device."""
        size = (self._block, self._block)
        lists = (self.query_rows, self.query_blocks, self.key_rows, self.key_blocks)
        return BlockMask(*lists, size, self._length, self._length, None, None)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return f"{self.name}, density={self.density:.3f}"
