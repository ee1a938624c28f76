"""Which tile the Gluon forward takes for a call: as measured on an H200
(kernels/dev/OPTIMISATION.md)."""

from torch import Tensor

from ...masks import BlockMask, Mask, Sequences
from ...options import Options
from ..portable.tile_table import width_of
from . import triton_compat
from .tiles import ForwardTile

# The tiles that masks are planned for by width, D padded: small ones waste least at documents'
# borders, for wide heads large ones are faster (kernels/dev/OPTIMISATION.md, points 7, 18 and 22).
PLANNED = {64: (64, 64), 128: (128, 128), 256: (128, 64)}
PLANNED_TWO = (64, 64)  # of two intervals a query
PACKED_LONG = {64: 1024, 128: 512}  # tokens

# One consumer warpgroup of 64 queries, several programs a multiprocessor: short
# sequences, windows and masks.
_SMALL = {
    64: ForwardTile(1, 64, 64, 2, turns=False, programs=3, q_stages=2, cap=80),
    128: ForwardTile(1, 64, 64, 2, turns=False, programs=2, q_stages=1, cap=128),
}
# As many warpgroups as the registers allow, one program a multiprocessor.
_LARGE = {
    64: ForwardTile(3, 64, 128, 4, registers=160, programs=1, q_stages=2),
    128: ForwardTile(2, 64, 128, 2, programs=1, q_stages=2),
    256: ForwardTile(2, 64, 64, 2, tight=True),
}
# D = 64, short, no mask.
_MIDDLE = ForwardTile(1, 64, 128, 2, turns=False, programs=2, q_stages=2, cap=128)
# Packed sequences, long and short ones on average.
PACKED = {
    64: (_LARGE[64], _SMALL[64]),
    128: (_LARGE[128]._replace(tight=True), _SMALL[128]),
}
# Tiles of 128 x 128, for blocks of that size and larger.
_TWO = {64: ForwardTile(2, 64, 128, 3, q_stages=2, programs=1), 128: _LARGE[128]}


def forward_tile(q: Tensor, k: Tensor, options: Options) -> ForwardTile:
    """Return the tile sizes and launch settings of a call."""
    return triton_compat.forward_tile(_measured_tile(q, k, options))


def _measured_tile(q: Tensor, k: Tensor, options: Options) -> ForwardTile:
    width, keys, mask = width_of(q.shape[3]), k.shape[1], options.mask
    if width == 256:
        return _LARGE[256]._replace(programs=int(isinstance(mask, (Mask, Sequences))))
    if isinstance(mask, Mask):
        two = width == 128 and mask.queries.shape[0] > 5  # spills registers in large tiles
        return _SMALL[128]._replace(programs=0) if two else (_SMALL | {128: _LARGE[128]})[width]
    if isinstance(mask, Sequences):
        short = keys < PACKED_LONG[width] * mask.number or (
            width == 64 and options.left is not None
        )
        if width == 64 and options.dropout_p > 0:
            return (_MIDDLE if short else _TWO[64])._replace(programs=0)
        return PACKED[width][short]
    if isinstance(mask, BlockMask):
        return _TWO[width] if min(mask.block_size) >= 128 else _SMALL[width]._replace(programs=0)
    if options.left is not None:
        return _SMALL[64] if width == 64 else _LARGE[128]
    # Draws take more registers than each of three warpgroups has.
    large = _TWO[64] if width == 64 and options.dropout_p > 0 else _LARGE[width]
    # With three warpgroups, and in loops of a few tiles, it gains nothing.
    tight = width == 128 and keys >= 2048
    if options.right is None:
        return _MIDDLE if width == 64 and keys <= 1024 else large._replace(tight=tight)
    if width == 64 and keys <= 2048:
        return _SMALL[64]._replace(paired=True)
    if keys >= 16384:  # an incomplete last round of pairs costs more than a start for every tile
        return large._replace(programs=0, stages=2, q_stages=1, tight=tight)
    return large._replace(paired=True, tight=tight)
