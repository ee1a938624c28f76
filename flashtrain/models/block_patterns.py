"""Block-sparse attention of a model: the pattern by name, and its lists as buffers that move with the module.

S sequence.
"""

from __future__ import annotations

from collections.abc import Callable

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
PATTERNS = (DENSE, *_PATTERNS)


class BlockPattern(nn.Module):
    """Which blocks of tokens see each other, both ways, in every layer and head (Dao et al. 2022, section 3.3).

    name: "butterfly" (block i sees those whose numbers differ in one binary digit), "local-global" (the `local`
    nearest blocks on each side, and the first `globals` blocks, which see all and are seen by all), or both together.
    length: S. block: tokens of a block, a power of two from 16. UserError for anything else.
    """

    def __init__(self, name: str, length: int, *, block: int = BLOCK, local: int = 1, globals: int = 1) -> None:
        super().__init__()
        if name not in _PATTERNS:
            raise unknown("attention pattern", name, PATTERNS)
        if block not in (16, 32, 64, 128, 256, 512, 1024):
            raise UserError(f"blocks of {block} tokens. Possible: 16, 32, 64, 128, 256, 512, 1024.")
        if local < 0 or globals < 0:
            raise UserError(f"{local} local and {globals} global blocks. Possible: 0 or more of each.")
        self.name = name
        made = block_mask(
            _PATTERNS[name](-(-length // block), local, globals), block_size=block, seqlen_q=length, seqlen_k=length
        )
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
