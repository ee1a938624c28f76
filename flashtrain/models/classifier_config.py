"""The configuration of a sequence classifier, with its block patterns and poolings.

Shapes: B batch, S sequence, E embedding width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError, at_least, between, one_of
from flashtrain.models.attention import check_heads
from flashtrain.models.block import FEED_FORWARDS, NORMS, check_shape
from flashtrain.models.positions import AXIAL_BASE, check_axial, check_rotary
from flashtrain_kernels import BlockMask, block_mask, block_sparse

DENSE = "dense"
TILED = ("tiles", "butterfly-tiles")
BLOCK = 128  # queries and keys of a block: the size that the sm_90 kernels support in both directions
POOLINGS = ("mean", "max", "attention")
INPUTS = ("tokens", "grey", "grey-table")
POSITIONS = ("learned", "rotary", "axial")
GREY_LEVELS = 256


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
PATTERNS = (DENSE, *_PATTERNS, *TILED)


def tile_of(block: int) -> tuple[int, int]:
    """(height, width) in pixels of a block's tile: 8 x 16 for 128; the width is the height or twice it."""
    height = 1 << ((block.bit_length() - 1) // 2)
    return height, block // height


def check_tiles(side: int, block: int) -> None:
    """Raise UserError unless tiles of `block` pixels fill a square image."""
    height, width = tile_of(block)
    if side % width:
        raise UserError(f"side={side} with tiles of {height} x {width} pixels: expected a multiple of {width}.")


def tile_order(side: int, block: int) -> Tensor:
    """(side * side,) int64: the raster numbers of a square image's pixels, tile by tile; UserError as check_tiles."""
    check_tiles(side, block)
    height, width = tile_of(block)
    pixels = torch.arange(side * side, device="cpu").view(side // height, height, side // width, width)
    return pixels.permute(0, 2, 1, 3).reshape(-1)


def near_tiles(side: int, block: int, local: int, globals: int) -> Tensor:
    """(tiles, tiles) bool: true for tiles up to `local` tile widths apart in both directions, and for the first
    `globals` tiles with all."""
    height, width = tile_of(block)
    number = torch.arange((side // height) * (side // width), device="cpu")
    row, column = number // (side // width), number % (side // width)
    near = ((row[:, None] - row).abs() * height <= local * width) & ((column[:, None] - column).abs() <= local)
    near[:globals] = True
    near[:, :globals] = True
    return near


class BlockPattern(nn.Module):
    """Which blocks of tokens see each other in every layer and head, symmetrically (Dao et al. 2022, section 3.3).

    A block of consecutive raster pixels is a strip of one row, far in the sequence from the pixels above it. Patterns
    of tiles therefore order the pixels tile by tile.

    Args:
        name: "butterfly" (block i sees those whose numbers differ in one binary digit), "local-global" (the `local`
            nearest blocks on each side, and the first `globals` blocks, which see all and are seen by all),
            "butterfly-local-global" (both), "tiles" (local-global with the tiles of a square image as blocks), or
            "butterfly-tiles".
        length: S.
        block: Tokens of a block, a power of two from 16 to 1,024.
        side: Of the image, for tiles.

    Raises:
        UserError: Other sizes.
    """

    order: Tensor | None  # (S,) int64: the pixel of each token (None: raster order)
    places: Tensor | None  # (S,) int64: the token of each pixel

    def __init__(
        self, name: str, length: int, *, block: int = BLOCK, local: int = 1, globals: int = 1, side: int | None = None
    ) -> None:
        super().__init__()
        if block not in (16, 32, 64, 128, 256, 512, 1024):
            raise UserError(f"blocks of {block} tokens: expected 16, 32, 64, 128, 256, 512 or 1024.")
        at_least("local", local, 0)
        at_least("globals", globals, 0)
        self.name = name
        order = None
        if name in TILED and side is not None:
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
        """The pattern as a BlockMask on the module's device."""
        size = (self._block, self._block)
        lists = (self.query_rows, self.query_blocks, self.key_rows, self.key_blocks)
        return BlockMask(*lists, size, self._length, self._length, None, None)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return f"{self.name}, density={self.density:.3f}"


class Pooling(nn.Module):
    """A sequence's states as one vector: their "mean", their component-wise "max", or "attention", a mean weighted by
    the softmax of their products with one learned vector (Lin et al. 2017, arXiv 1703.03130, with one hop)."""

    def __init__(self, kind: str, embed: int) -> None:
        super().__init__()
        self.kind = kind
        self.score = nn.Linear(embed, 1, bias=False) if kind == "attention" else None

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """x (B, S, E) -> (B, E). real: (B, S) bool, False for padding; each row has at least one token."""
        if self.kind == "max":
            if real is not None:
                x = x.masked_fill(~real[..., None], torch.finfo(x.dtype).min)
            return x.max(dim=1).values  # not amax: see bert_classifiers.max_of_tokens
        if self.score is not None:
            scores = self.score(x).float() if x.dtype != torch.float64 else self.score(x)
            if real is not None:
                scores = scores.masked_fill(~real[..., None], -torch.inf)
            weights = torch.softmax(scores, dim=1).to(x.dtype)
        elif real is not None:
            weights = real[..., None].to(x.dtype) / real.sum(dim=1)[:, None, None]
        else:
            return x.mean(dim=1)
        if real is not None:
            x = x.masked_fill(~real[..., None], 0.0)
        return (weights * x).sum(dim=1)

    def extra_repr(self) -> str:
        return self.kind


@dataclass(frozen=True)
class ClassifierConfig:
    """The configuration of a Classifier; with the weights it is enough to rebuild one.

    Args:
        classes: Number of classes.
        length: Tokens of the longest sequence, a limit with learned positions only.
        vocab_size: Rows of the token table, padding included.
        inputs: "tokens" (numbers below vocab_size, looked up in a table), "grey-table" (grey levels 0..255, looked up
            in a table) or "grey" (grey levels as a value in [-1, 1] times one learned vector plus another, so that
            levels which no training image had mean something, as a curriculum of differing contrasts needs).
        positions: "learned", "rotary", or "axial" (rotary by row and column of a square image of `side` pixels).
        rope_base: Base of the rotary angles (None: 10000, axial 100).
        pooling: See Pooling.
        towers: 2 where a sample is two sequences a and b; the head then reads [a, b, a * b, a - b].
        grey_bins: Classes for masked grey levels, a divisor of 256; for masked tokens vocab_size; 0 for no such head.
        pattern, pattern_block, pattern_local, pattern_globals: See BlockPattern; "dense" sees every token.

    Raises:
        UserError: Sizes that do not fit together, or an unknown name.
    """

    classes: int
    length: int
    embed: int = 128
    layers: int = 4
    heads: int = 2
    ffn: int = 512
    vocab_size: int = GREY_LEVELS
    inputs: str = "grey"
    positions: str = "axial"
    side: int | None = None
    rope_base: float | None = None
    pooling: str = "max"
    towers: int = 1
    norm: str = "layernorm"
    activation: str = "gelu"
    dropout: float = 0.0
    grey_bins: int = 0
    pattern: str = DENSE
    pattern_block: int = BLOCK
    pattern_local: int = 1
    pattern_globals: int = 1

    def __post_init__(self) -> None:
        names = {"inputs": INPUTS, "positions": POSITIONS, "pooling": POOLINGS, "norm": NORMS}
        sizes = ("length", "embed", "layers", "heads", "ffn", "vocab_size")
        check_shape(self, sizes, {**names, "activation": FEED_FORWARDS})
        at_least("classes", self.classes, 2)
        between("towers", self.towers, 1, 2)
        one_of("attention pattern", self.pattern, PATTERNS)
        head_dim = check_heads(self.embed, self.heads, self.heads)
        if self.positions == "axial":
            check_axial(head_dim, self.angle_base)
        elif self.positions == "rotary":
            check_rotary(head_dim, self.angle_base)
        if (self.pattern in TILED or self.positions == "axial") and not self._is_square:
            raise UserError(
                f"pattern={self.pattern} and positions={self.positions} with length={self.length} and "
                f"side={self.side}: tiles and axial positions need square images, length = side * side."
            )
        if self.grey_bins and self.inputs == "tokens":
            if self.towers == 2:
                raise UserError("tokens cannot be masked in samples of two sequences. Set grey_bins=0 or towers=1.")
            if self.grey_bins != self.vocab_size:
                raise UserError(
                    f"grey_bins={self.grey_bins} for masked tokens: expected vocab_size ({self.vocab_size}) or 0."
                )
        elif self.grey_bins and (self.grey_bins < 2 or GREY_LEVELS % self.grey_bins):
            raise UserError(f"grey_bins={self.grey_bins}: expected a power of two from 2 to 256.")

    @property
    def _is_square(self) -> bool:
        return self.side is not None and self.side * self.side == self.length

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    @property
    def angle_base(self) -> float:
        """The base of the rotary angles."""
        if self.rope_base is not None:
            return self.rope_base
        return AXIAL_BASE if self.positions == "axial" else 10000.0
