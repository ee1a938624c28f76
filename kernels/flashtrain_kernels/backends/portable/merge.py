"""The kernel that merges attention over further keys into attention over those before.

B batch, S queries, H query heads, D head dimension. A tile is ROWS queries of one head.
"""

import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, ceil_div, padded, strides_of

_ROWS = 32


@triton.jit(do_not_specialize=["tiles", "heads", "seqlen"])
def merge_kernel(
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, out_strides, lse_strides, part_strides,
    part_lse_strides, tiles, heads,
    seqlen, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Kernel: one program merges a tile of the part's out (B, S, H, D) and lse (B, H, S) into out
    and lse, in place. Rows that see no key of the part (its lse is -inf) stay as they are."""
    head_index = tl.program_id(0) // tiles
    query = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    batch = (head_index // heads).to(tl.int64)
    head = (head_index % heads).to(tl.int64)
    lse_at = lse_ptr + batch * lse_strides[0] + head * lse_strides[1] + query
    part_lse_at = part_lse_ptr + batch * part_lse_strides[0] + head * part_lse_strides[1] + query
    part_lse = tl.load(part_lse_at, mask=query < seqlen, other=float("-inf"))
    seen = part_lse != float("-inf")
    lse = tl.load(lse_at, mask=seen, other=0.0)
    highest = tl.maximum(lse, part_lse)
    before = tl.exp(lse - highest)
    added = tl.exp(part_lse - highest)
    total = before + added
    # Every thread has read the row's lse before one of them writes over it: several hold a row.
    tl.debug_barrier()
    tl.store(lse_at, highest + tl.log(total), mask=seen)
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = seen[:, None] & (column < HEAD_DIM)
    row = query.to(tl.int64)[:, None]
    out_at = (
        out_ptr + batch * out_strides[0] + row * out_strides[1] + head * out_strides[2] + column
    )
    part_at = (
        part_ptr + batch * part_strides[0] + row * part_strides[1] + head * part_strides[2] + column
    )
    out = tl.load(out_at, mask=inside, other=0.0)
    part = tl.load(part_at, mask=inside, other=0.0).to(out.dtype)
    tl.store(out_at, out * (before / total)[:, None] + part * (added / total)[:, None], mask=inside)


def merge_launch(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> Launch:
    """Return the launch that merges part_out (B, S, H, D) and part_lse (B, H, S) into out and lse,
    in place; the last stride of each is 1."""
    batch, seqlen, heads, head_dim = out.shape
    tiles = ceil_div(seqlen, _ROWS)
    return Launch(
        kernel=merge_kernel,
        grid=(tiles * batch * heads,),
        args=(
            out, lse, part_out, part_lse, strides_of(out), lse.stride()[:2], strides_of(part_out),
            part_lse.stride()[:2], tiles, heads, seqlen,
        ),
        constants={"HEAD_DIM": head_dim, "BLOCK_D": padded(head_dim), "ROWS": _ROWS},
        options={"num_warps": 4},
    )  # fmt: skip
