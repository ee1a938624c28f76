"""The kernel of linear_cross_entropy: each row's loss from its logits, which the
gradient then overwrites."""

import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch

BLOCK = 4096
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["vocab_size", "ignored"])
def softmax_rows_kernel(
    logits,
    labels,
    losses,
    dlosses,
    stride,
    vocab_size,
    columns,
    ignored,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Kernel: one program computes one row's losses[row] = logsumexp(logits[row, :vocab_size]) -
    logits[row, label], 0 for the label `ignored`. GRADIENT: overwrite the logits (`columns` a row)
    with dlosses[row] times its gradient."""
    row = tl.program_id(0).to(tl.int64)
    at_row = logits + row * stride
    label = tl.load(labels + row)
    highest = float("-inf")
    total = 0.0
    for at in range(0, vocab_size, BLOCK):
        column = at + tl.arange(0, BLOCK)
        x = tl.load(at_row + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp2((highest - higher) * LOG2E) + tl.sum(
            tl.exp2((x - higher) * LOG2E), 0
        )
        highest = higher
    lse = highest + tl.log(total)
    # A label that stands for no token has no probability: its loss is infinite, which
    # no training overlooks.
    exists = (label >= 0) & (label < vocab_size)
    picked = tl.load(at_row + label, mask=exists, other=float("-inf")).to(tl.float32)
    counted = label != ignored
    tl.store(losses + row, tl.where(counted, lse - picked, 0.0))
    if GRADIENT:
        scale = tl.load(dlosses + row)
        # Every thread has read the label's logit before one of them writes over it.
        tl.debug_barrier()
        for at in range(0, columns, BLOCK):
            column = at + tl.arange(0, BLOCK)
            x = tl.load(at_row + column, mask=column < vocab_size, other=float("-inf")).to(
                tl.float32
            )
            p = tl.exp2((x - lse) * LOG2E)
            p = tl.where(column == label, p - 1.0, p) * scale
            p = tl.where(counted, p, 0.0)
            tl.store(at_row + column, p.to(logits.dtype.element_ty), mask=column < columns)


def softmax_rows_launch(
    logits: Tensor,
    labels: Tensor,
    losses: Tensor,
    vocab_size: int,
    ignored: int,
    dlosses: Tensor | None,
) -> Launch:
    """Return the launch that fills losses (N,) float32 from logits (N, V) and labels (N,) int64;
    with dlosses (N,) float32 it overwrites the logits, whose rows are contiguous, with d(sum of
    losses * dlosses)/d(logits)."""
    upstream = losses if dlosses is None else dlosses  # losses: not read
    args = (
        logits,
        labels,
        losses,
        upstream,
        logits.stride(0),
        vocab_size,
        logits.shape[1],
        ignored,
    )
    constants = {"GRADIENT": dlosses is not None, "BLOCK": BLOCK}
    return Launch(softmax_rows_kernel, (logits.shape[0],), args, constants, {"num_warps": 4})
