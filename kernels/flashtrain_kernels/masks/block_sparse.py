"""Block-sparse attention (FlashAttention, arXiv 2205.14135, section 3.3): the blocks that each
head computes, as lists.

B batch, H query heads, Sq queries, Sk keys; nq and nk blocks of queries and of keys. Bm
is B or 1, Hm is H or 1.

    blocks = butterfly(seqlen // 128) | local_global(seqlen // 128, seqlen // 128, local=1,
    globals=1) mask = block_mask(blocks, block_size=128, seqlen_q=seqlen, seqlen_k=seqlen,
    causal=True) out = flash_attn_func(q, k, v, causal=True, mask=mask)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_dtype, check_flag, check_length, check_number, check_window

__all__ = [
    "BlockMask",
    "block_mask",
    "butterfly",
    "local_global",
    "random",
    "sliding_tiles",
    "tile_order",
]

_SIZES = tuple(2**power for power in range(4, 13))
_ENTRIES_AT_ONCE = 1 << 14  # blocks that density() counts at once: bounds its memory


class BlockMask(NamedTuple):
    """A block-sparse mask, made by `block_mask`: lists of the key blocks that each query block
    sees, and the reverse.

    Attributes:
        query_rows: (Bm, Hm, nq, 3) int64, (begin, split, end) of each block of queries: it sees the
            blocks of keys query_blocks[begin:end]. Those before split are partly hidden (by the
            band's edge, or the end of queries or keys); those from split on are wholly visible.
        query_blocks: (nnz,) int32, numbers of blocks of keys, ascending before
            split and from split on.
        key_rows: (Bm, Hm, nk, 3) int64: the same for each block of keys, for
            the gradients dK and dV.
        key_blocks: (nnz,) int32: the same, numbers of blocks of queries.
        block_size: (queries, keys) in a block.
        seqlen_q, seqlen_k: Sq and Sk.
        left, right: query i sees key j only when i + left <= j <= i + right; None: no bound.
    """

    query_rows: Tensor
    query_blocks: Tensor
    key_rows: Tensor
    key_blocks: Tensor
    block_size: tuple[int, int]
    seqlen_q: int
    seqlen_k: int
    left: int | None
    right: int | None

    def blocks(self) -> Tensor:
        """Return (Bm, Hm, nq, nk) bool, True for the blocks in the lists. May
        wait for the device."""
        batch, heads, nq = self.query_rows.shape[:3]
        nk = self.key_rows.shape[2]
        found = torch.zeros(
            batch * heads * nq * nk, dtype=torch.bool, device=self.query_rows.device
        )
        found[self._rows() * nk + self.query_blocks] = True
        return found.view(batch, heads, nq, nk)

    def dense(self) -> Tensor:
        """Return (Bm, Hm, Sq, Sk) bool, True where a query sees a key: the whole matrix, for
        tests and small sizes."""
        size_q, size_k = self.block_size
        seen = self.blocks().repeat_interleave(size_q, 2)[:, :, : self.seqlen_q]
        seen = seen.repeat_interleave(size_k, 3)[:, :, :, : self.seqlen_k]
        query = torch.arange(self.seqlen_q, device=seen.device)[:, None]
        key = torch.arange(self.seqlen_k, device=seen.device)[None, :]
        if self.left is not None:
            seen = seen & (key >= query + self.left)
        if self.right is not None:
            seen = seen & (key <= query + self.right)
        return seen

    def density(self) -> float:
        """Return the fraction of the Bm * Hm * Sq * Sk (query, key) pairs that is
        visible. Waits for the device."""
        batch, heads, nq = self.query_rows.shape[:3]
        total = batch * heads * self.seqlen_q * self.seqlen_k
        size_q, size_k = self.block_size
        pairs = (self.query_rows[..., 2] - self.query_rows[..., 1]).sum() * size_q * size_k
        rows = self._rows()
        place = torch.arange(rows.shape[0], device=rows.device)
        partly = (place < self.query_rows[..., 1].flatten()[rows]).nonzero()
        for entries in partly.split(_ENTRIES_AT_ONCE):
            first_key = self.query_blocks[entries].to(torch.int64) * size_k
            query = rows[entries] % nq * size_q + torch.arange(size_q, device=rows.device)
            last_key = (first_key + size_k).clamp(max=self.seqlen_k) - 1
            low = first_key if self.left is None else torch.maximum(first_key, query + self.left)
            high = last_key if self.right is None else torch.minimum(last_key, query + self.right)
            pairs += torch.where(query < self.seqlen_q, (high - low + 1).clamp(min=0), 0).sum()
        return pairs.item() / total if total else 0.0

    def _rows(self) -> Tensor:
        """(nnz,) int64: which row of query_rows, over batch and heads, each
        listed block belongs to."""
        lengths = (self.query_rows[..., 2] - self.query_rows[..., 0]).flatten()
        rows = torch.arange(lengths.shape[0], device=lengths.device)
        return rows.repeat_interleave(lengths, output_size=self.query_blocks.shape[0])


def block_mask(
    blocks: Tensor,
    *,
    block_size: int | tuple[int, int],
    seqlen_q: int,
    seqlen_k: int,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> BlockMask:
    """Make a BlockMask from a pattern of blocks, on its device. Waits for the device: make it
    once, not at every step.

    Args:
        blocks: bool, (H or 1, nq, nk) or (B or 1, H or 1, nq, nk), True where a block is computed;
            nq = ceil(Sq / queries in a block), nk likewise. `butterfly`, `local_global` and
            `random` make such patterns.
        block_size: (queries, keys) in a block, or one number for both; powers
            of two from 16 to 4096.
        seqlen_q, seqlen_k: Sq and Sk.
        causal, window_size: hide pairs as in flash_attn_func, aligned bottom-right; give
            that call the same values.

    Raises:
        TypeError, ValueError: the message names the argument.
    """
    size_q, size_k = _check(blocks, block_size, seqlen_q, seqlen_k, causal, window_size)
    shift = seqlen_k - seqlen_q
    left = None if window_size[0] < 0 else shift - window_size[0]
    right = shift if causal else None if window_size[1] < 0 else shift + window_size[1]
    if blocks.dim() == 3:
        blocks = blocks[None]
    visible, whole = _in_band(blocks, (size_q, size_k), seqlen_q, seqlen_k, left, right)
    by_queries, by_keys = _Lists(), _Lists()
    # One at a time: a list of indices takes more memory than the pattern.
    for head in blocks.flatten(0, 1):
        seen = head & visible
        by_queries.add(seen & ~whole, seen & whole)
        by_keys.add((seen & ~whole).T, (seen & whole).T)
    query_rows, query_blocks = by_queries.joined(blocks)
    key_rows, key_blocks = by_keys.joined(blocks)
    return BlockMask(
        query_rows,
        query_blocks,
        key_rows,
        key_blocks,
        (size_q, size_k),
        seqlen_q,
        seqlen_k,
        left,
        right,
    )


def _in_band(
    blocks: Tensor,
    size: tuple[int, int],
    seqlen_q: int,
    seqlen_k: int,
    left: int | None,
    right: int | None,
) -> tuple[Tensor, Tensor]:
    """Return two (nq, nk) bool tensors: whether a block has a pair in the band, and whether all its
    pairs are in the band and within Sq and Sk."""
    first_query = (torch.arange(blocks.shape[2], device=blocks.device) * size[0])[:, None]
    first_key = (torch.arange(blocks.shape[3], device=blocks.device) * size[1])[None, :]
    last_query, last_key = first_query + size[0] - 1, first_key + size[1] - 1
    whole = (last_query < seqlen_q) & (last_key < seqlen_k)
    last_query, last_key = last_query.clamp(max=seqlen_q - 1), last_key.clamp(max=seqlen_k - 1)
    # key - query takes every value from lowest to highest somewhere in the block.
    lowest, highest = first_key - last_query, last_key - first_query
    visible = torch.ones_like(whole)
    if left is not None:
        visible, whole = visible & (highest >= left), whole & (lowest >= left)
    if right is not None:
        visible, whole = visible & (lowest <= right), whole & (highest <= right)
    return visible, whole & visible


class _Lists:
    """The rows and blocks of a BlockMask (query_rows and query_blocks, or the keys'), collected
    head by head."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self.blocks: list[Tensor] = []
        self.length = 0

    def add(self, masked: Tensor, whole: Tensor) -> None:
        """Add one head's blocks, (n, m) bool each: `masked` ones need a test of each
        element, `whole` ones none."""
        masked_count, whole_count = masked.sum(1), whole.sum(1)
        end = (masked_count + whole_count).cumsum(0)
        row_masked, block_masked = masked.nonzero(as_tuple=True)
        row_whole, block_whole = whole.nonzero(as_tuple=True)
        length = row_masked.shape[0] + row_whole.shape[0]
        blocks = torch.empty(length, dtype=torch.int32, device=masked.device)
        # nonzero goes row by row, so an entry's place is its own number plus what the other
        # part puts before it.
        before = whole_count.cumsum(0) - whole_count
        blocks[torch.arange(row_masked.shape[0], device=masked.device) + before[row_masked]] = (
            block_masked.int()
        )
        after = masked_count.cumsum(0)
        blocks[torch.arange(row_whole.shape[0], device=masked.device) + after[row_whole]] = (
            block_whole.int()
        )
        split, begin = end - whole_count, end - whole_count - masked_count
        self.rows.append(torch.stack([begin, split, end], -1) + self.length)
        self.blocks.append(blocks)
        self.length += length

    def joined(self, pattern: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows (Bm, Hm, n, 3) and blocks (nnz,) for the heads of a
        pattern (Bm, Hm, nq, nk)."""
        rows = torch.stack(self.rows)
        return rows.view(*pattern.shape[:2], *rows.shape[1:]), torch.cat(self.blocks)


def _check(
    blocks: Tensor,
    block_size: int | tuple[int, int],
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    window_size: tuple[int, int],
) -> tuple[int, int]:
    """Raise TypeError or ValueError unless the arguments of block_mask are valid; return the block
    size as (queries, keys)."""
    size = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if len(size) != 2 or any(isinstance(side, bool) or side not in _SIZES for side in size):
        raise ValueError(
            f"block_size must be one or two powers of two from 16 to 4096, not {block_size!r}"
        )
    check_length("seqlen_q", seqlen_q)
    check_length("seqlen_k", seqlen_k)
    check_window("window_size", window_size)
    check_flag("causal", causal)
    check_dtype("blocks", blocks, "(H or 1, nq, nk) or (B or 1, H or 1, nq, nk)", (torch.bool,))
    if blocks.dim() not in (3, 4) or 0 in blocks.shape[:-2]:
        raise ValueError(
            "blocks must have the shape (H or 1, nq, nk) or (B or 1, H or 1, nq, nk), "
            f"not {tuple(blocks.shape)}"
        )
    counts = (-(-seqlen_q // size[0]), -(-seqlen_k // size[1]))
    if tuple(blocks.shape[-2:]) != counts:
        raise ValueError(
            f"blocks must end in the shape (nq, nk) = {counts} for {seqlen_q} queries and "
            f"{seqlen_k} keys in blocks of {size[0]} and {size[1]}, not {tuple(blocks.shape[-2:])}"
        )
    return size


# Patterns: bool tensors of the blocks to compute; combine them with | and &.


def butterfly(blocks: int, *, device: torch.device | str | None = None) -> Tensor:
    """Make the fixed butterfly pattern, (1, n, n) bool for n = `blocks`: about
    log2(n) + 1 blocks in each row.

    Blocks i and j meet when i = j or their numbers differ in exactly one binary digit: the flat
    block butterfly of Pixelated Butterfly (arXiv 2112.00029), which block-sparse FlashAttention
    uses (arXiv 2205.14135, section 3.3). Combine it with local and global blocks: `butterfly(n) |
    local_global(n, n, local=1, globals=1)`.
    """
    check_length("blocks", blocks)
    index = torch.arange(blocks, device=device)
    apart = index[:, None] ^ index[None, :]
    return ((apart & (apart - 1)) == 0)[None]


def local_global(
    nq: int, nk: int, *, local: int, globals: int, device: torch.device | str | None = None
) -> Tensor:
    """Make a pattern (1, nq, nk) bool of a band along the diagonal and of global blocks, which
    see and are seen by all.

    Args:
        nq, nk: numbers of blocks of queries and of keys.
        local: blocks on each side of the diagonal, which ends at the last
            blocks of queries and keys.
        globals: how many of the first blocks are global; 0: none.
    """
    for name, value in (("nq", nq), ("nk", nk), ("local", local), ("globals", globals)):
        check_length(name, value)
    query = torch.arange(nq, device=device)[:, None]
    key = torch.arange(nk, device=device)[None, :]
    near = (key - (query + nk - nq)).abs() <= local
    return (near | (query < globals) | (key < globals))[None]


def sliding_tiles(tiles: tuple[int, int, int], window: tuple[int, int, int]) -> Tensor:
    """Make the pattern of sliding tile attention (arXiv 2502.04507), (1, n, n) bool on the CPU: a
    tile of a video sees the window of tiles around it, which at an edge is moved inside.

    Args:
        tiles: numbers (frames, rows, columns) of tiles, the blocks; n is their product.
        window: the window's sides in tiles, odd.
    """
    if any(side % 2 == 0 for side in window):
        raise ValueError(f"window must have odd sides, not {window}")
    seen = torch.ones(1, 1, dtype=torch.bool, device="cpu")
    for count, side in zip(tiles, window, strict=True):
        index, reach = torch.arange(count, device="cpu"), side // 2
        near = (index.clamp(reach, count - 1 - reach)[:, None] - index).abs() <= reach
        seen = (seen[:, None, :, None] & near[:, None]).flatten(2).flatten(0, 1)
    return seen[None]


def tile_order(volume: tuple[int, int, int], tile: tuple[int, int, int]) -> Tensor:
    """Return the raster numbers of a video's tokens in the order of its tiles, (S,) int64 on the
    CPU; `volume` and `tile`, which divides it: frames, rows and columns in tokens."""
    if any(side % part for side, part in zip(volume, tile, strict=True)):
        raise ValueError(f"tile must divide volume {volume}, not {tile}")
    (t, h, w), (a, b, c) = volume, tile
    number = torch.arange(t * h * w, device="cpu").view(t // a, a, h // b, b, w // c, c)
    return number.permute(0, 2, 4, 1, 3, 5).flatten()


def random(
    heads: int,
    nq: int,
    nk: int,
    density: float,
    *,
    seed: int = 0,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Make a random pattern (H, nq, nk) bool: in each row of each head, exactly
    round(density * nk) blocks of keys.

    Args:
        density: in [0, 1]; a row has at least one block unless density is 0.
        generator: the source of randomness, on `device`; default: a new generator with `seed`.
    """
    for name, value in (("heads", heads), ("nq", nq), ("nk", nk)):
        check_length(name, value)
    check_number("density", density)
    if not 0.0 <= density <= 1.0:
        raise ValueError(f"density must be from 0 to 1, not {density}")
    if generator is None:
        generator = torch.Generator(device or "cpu").manual_seed(seed)
    chosen = torch.zeros(heads, nq, nk, dtype=torch.bool, device=device)
    count = min(nk, max(round(density * nk), 1)) if density > 0 else 0
    # One at a time: the random numbers take four times the pattern's memory, and more.
    for head in chosen:
        order = torch.rand(nq, nk, generator=generator, device=device).topk(count, dim=1).indices
        head.scatter_(1, order, True)
    return chosen
