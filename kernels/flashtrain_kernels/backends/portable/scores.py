"""Triton helpers for what changes a score (softcap, ALiBi, bias) and what drops a weight (dropout).

`head`, from `head_options`, holds what one head's program needs of the options: scale * log2(e), scale / softcap,
softcap * log2(e), pointer and stride of its ALiBi slopes, pointer and two strides of its bias, the random seed, the
head's number, the number added to a sequence's, and the dropout threshold. `rows` is tiles.query_rows `with_slope`.
"""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def head_options(
    head, scale_log2, cap_in, cap_log2, slopes_ptr, stride_slopes, bias, stride_bq, stride_bk, seed_ptr, threshold,
    F: tl.constexpr,
):  # fmt: skip
    """The tuple `head` of this file. bias: pointer to this batch row's and head's bias."""
    seed = 0
    sequence = 0
    number = head
    if F.dropout:
        seed = tl.load(seed_ptr)
        sequence = tl.load(seed_ptr + 1)
        number = (head + tl.load(seed_ptr + 2)).to(tl.int32)
    return (
        scale_log2, cap_in, cap_log2, slopes_ptr + head, stride_slopes, bias, stride_bq, stride_bk, seed, number,
        sequence, threshold,
    )  # fmt: skip


@triton.jit
def with_slope(rows, head, F: tl.constexpr):
    """Append to `rows` the ALiBi slope * log2(e) of each query: one number, unless sequences have their own."""
    slope = 0.0
    if F.alibi:
        slope = tl.load(head[3] + rows[7] * head[4]) if F.slope_rows else tl.load(head[3])
        slope *= _LOG2E
    return rows[0], rows[1], rows[2], rows[3], rows[4], rows[5], rows[6], rows[7], slope


@triton.jit
def _tanh(x):
    # Exact at both ends: exp(2x) overflows to inf, or vanishes. Near 0 the error stays below 1e-7 of the softcap.
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def load_bias(head, rows, key, bounds):
    """The bias of a tile, in float32."""
    pointers = head[5] + rows[0].to(tl.int64) * head[6] + key.to(tl.int64) * head[7]
    return tl.load(pointers, mask=(rows[0] < bounds[0]) & (key < bounds[1]), other=0.0).to(tl.float32)


@triton.jit
def logits(scores, head, rows, key, first_key, position, bounds, F: tl.constexpr):
    """Products q k -> scores in base 2, and softcap's tanh (else 0), which its derivative needs."""
    capped = 0.0
    if F.softcap:
        capped = _tanh(scores * head[1])
        x = capped * head[2]
    else:
        x = scores * head[0]
    if F.alibi:
        # As float32 before they meet, one conversion a row and a column; counted from the tile's first key they are
        # exact up to 2^24 from there.
        x -= rows[8] * tl.abs((rows[5] - first_key).to(tl.float32) - (position - first_key).to(tl.float32))
    if F.bias:
        bias = load_bias(head, rows, key, bounds)
        # -inf hides the pair, even where the score is NaN.
        x = tl.where(bias == float("-inf"), float("-inf"), x + bias * _LOG2E)
    return x, capped


@triton.jit
def kept(
    head,
    rows,
    first_key,
    position,
    TRANSPOSED: tl.constexpr,
    F: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Which weights of a tile dropout keeps: Philox4x32-7 (Salmon et al. 2011) of (key // 4, query, head, sequence),
    word key % 4, positions counted from the sequence's first key. So the tile's size and place change nothing.

    The tile is (queries, keys), TRANSPOSED (keys, queries), as `rows` and `position` are shaped.
    """
    query = (rows[5] - rows[6]).to(tl.int32)
    sequence = (rows[7] + head[10]).to(tl.int32)
    if F.intervals:
        # Sequences begin anywhere, so neighbouring keys share no call here: each pair makes its own.
        key = (position - rows[6]).to(tl.int32)
        w0, w1, w2, w3 = tl.philox(head[8], key >> 2, query, head[9], sequence, 7)
        index = key & 3
        word = tl.where(index == 0, w0, tl.where(index == 1, w1, tl.where(index == 2, w2, w3)))
    else:
        group = tl.cast(first_key // 4, tl.int32) + tl.arange(0, BLOCK_K // 4)
        if TRANSPOSED:
            w0, w1, w2, w3 = tl.philox(head[8], group[:, None], query, head[9], sequence, 7)
        else:
            w0, w1, w2, w3 = tl.philox(head[8], group[None, :], query, head[9], sequence, 7)
        word = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        if TRANSPOSED:
            word = tl.reshape(tl.permute(word, (0, 2, 3, 1)), (BLOCK_K, BLOCK_Q))
        else:
            word = tl.reshape(word, (BLOCK_Q, BLOCK_K))
    return (word >> 1).to(tl.int32) >= head[11]
