"""What a kernel is compiled for besides shapes: one value, so that three kernels and their loops share one list."""

from typing import NamedTuple

from ...masks import BlockMask, Mask
from ...options import Options


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
