"""The kernels of attention sinks: each row's softmax has one more score, whose value is 0.

B batch, Sq queries, H query heads, D head dimension. A tile is ROWS queries of one head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, ceil_div, padded, strides_of
from .tiles import Strided

_ROWS = 64


@triton.jit
def _place(tiles, heads, seqlen, ROWS: tl.constexpr):
    """Return this program's batch row, head, the indices of its tile's queries, and their indices
    in a log-sum-exp tensor (B, H, Sq)."""
    head_index = tl.program_id(0) // tiles
    query = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    batch = (head_index // heads).to(tl.int64)
    return batch, head_index % heads, query, head_index.to(tl.int64) * seqlen + query


@triton.jit(do_not_specialize=["tiles", "heads", "seqlen"])
def join_kernel(
    out_ptr, lse_ptr, sink_ptr, tiles, heads, seqlen, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr
):  # fmt: skip
    """Kernel: one program rescales a tile of out (B, Sq, H, D) and lse (B, H, Sq), in
    place, to include the sink."""
    batch, head, query, place = _place(tiles, heads, seqlen, ROWS)
    real = query < seqlen
    sink = tl.load(sink_ptr + head).to(tl.float32)
    lse = tl.load(lse_ptr + place, mask=real, other=0.0)
    hidden = lse == float("-inf")  # no key: the sink has it all, and is -inf perhaps
    above = tl.where(hidden, 0.0, lse - sink)
    share = tl.where(hidden, 0.0, 1.0 / (1.0 + tl.exp(-above)))
    more = tl.log(1.0 + tl.exp(-tl.abs(above)))
    total = tl.where(hidden, sink, tl.where(above >= 0, lse, sink) + more)
    # Every thread has read the row's lse before one of them writes over it: several hold a row.
    tl.debug_barrier()
    tl.store(lse_ptr + place, tl.where(above == above, total, above), mask=real)
    column = tl.arange(0, BLOCK_D)
    rows = (batch * seqlen + query) * heads + head
    pointers = out_ptr + rows[:, None] * HEAD_DIM + column[None, :]
    inside = real[:, None] & (column < HEAD_DIM)[None, :]
    out = tl.load(pointers, mask=inside, other=0.0)
    tl.store(pointers, (out.to(tl.float32) * share[:, None]).to(out.dtype), mask=inside)


@triton.jit(do_not_specialize=["tiles", "heads", "seqlen"])
def tile_gradient_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, sink_ptr, sums_ptr, dout_strides, tiles, heads, seqlen,
    HAS_DLSE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Kernel: one program stores, for one tile of queries, the sum of exp(sink - lse) * (dLSE -
    rowsum(dO * O)), the tile's part of the sink's gradient. lse and out include the sink."""
    batch, head, query, place = _place(tiles, heads, seqlen, ROWS)
    real = query < seqlen
    sink = tl.load(sink_ptr + head).to(tl.float32)
    lse = tl.load(lse_ptr + place, mask=real, other=float("inf"))
    weight = tl.where(lse == float("-inf"), 0.0, tl.exp(sink - lse))
    column = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (column < HEAD_DIM)[None, :]
    rows = (batch * seqlen + query) * heads + head
    out = tl.load(out_ptr + rows[:, None] * HEAD_DIM + column[None, :], mask=inside, other=0.0)
    of_dout = Strided(dout_ptr, *dout_strides)
    dout_base = of_dout.pointer + batch * of_dout.batch + head.to(tl.int64) * of_dout.head
    dout_rows = query.to(tl.int64)[:, None] * of_dout.row
    dout = tl.load(dout_base + dout_rows + column[None, :], mask=inside, other=0.0)
    gradient = -tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        gradient += tl.load(dlse_ptr + place, mask=real, other=0.0)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(tl.where(real, weight * gradient, 0.0), 0))


@triton.jit(do_not_specialize=["tiles", "heads", "batches"])
def gradient_kernel(sums_ptr, gradient_ptr, tiles, heads, batches, COUNT: tl.constexpr):
    """Kernel: one program adds the parts of all tiles of one head, in a fixed order, to
    get its sink's gradient."""
    head = tl.program_id(0)
    total = tl.zeros([COUNT], tl.float32)
    for batch in tl.range(0, batches):
        first = (batch * heads + head).to(tl.int64) * tiles
        for begin in tl.range(0, tiles, COUNT):
            tile = begin + tl.arange(0, COUNT)
            total += tl.load(sums_ptr + first + tile, mask=tile < tiles, other=0.0)
    tl.store(gradient_ptr + head, tl.sum(total, 0).to(gradient_ptr.dtype.element_ty))


def join(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """Change out (B, Sq, H, D) and lse (B, H, Sq), both contiguous, in place to those of
    attention with sink (H,)."""
    batch, seqlen, heads, head_dim = out.shape
    tiles = ceil_div(seqlen, _ROWS)
    Launch(
        kernel=join_kernel,
        grid=(tiles * batch * heads,),
        args=(out, lse, sink.contiguous(), tiles, heads, seqlen),
        constants={"HEAD_DIM": head_dim, "BLOCK_D": padded(head_dim), "ROWS": _ROWS},
        options={"num_warps": 4},
    ).run()


def gradient(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return the gradient (H,) of the sink, given out and lse from `join`, contiguous, and
    dout with last stride 1."""
    batch, seqlen, heads, head_dim = out.shape
    tiles = ceil_div(seqlen, _ROWS)
    sums = torch.empty(tiles * batch * heads, dtype=torch.float32, device=out.device)
    made = torch.empty(sink.shape, dtype=sink.dtype, device=sink.device)
    Launch(
        kernel=tile_gradient_kernel,
        grid=(tiles * batch * heads,),
        args=(
            out, dout, lse, lse if dlse is None else dlse, sink.contiguous(), sums,
            strides_of(dout), tiles, heads,
            seqlen,
        ),
        constants={"HAS_DLSE": dlse is not None, "HEAD_DIM": head_dim, "BLOCK_D": padded(head_dim),
            "ROWS": _ROWS},
        options={"num_warps": 4},
    ).run()  # fmt: skip
    Launch(
        kernel=gradient_kernel,
        grid=(heads,),
        args=(sums, made, tiles, heads, batch),
        constants={"COUNT": 256},
        options={"num_warps": 4},
    ).run()
    return made
