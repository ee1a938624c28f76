"""The first of a plan's two kernels: it finds which keys each tile of queries sees, and
each key tile's positions.

plan.py has the second, which reads them. Bm batch rows of the mask, Sq queries, Sk keys.
"""

import triton
import triton.language as tl

INT_MAX = tl.constexpr(2**31 - 1)
NOT_SPECIALISED = [
    "batch", "seqlen_q", "seqlen_k", "tiles_fwd_q", "tiles_fwd_k", "tiles_dq_q", "tiles_dq_k",
    "tiles_q", "tiles_k",
    "programs_q", "programs_fwd_k", "programs_dq_k",
]  # fmt: skip


@triton.jit
def interval(queries, row, low_row, batch, number, seqlen_q, AXIS: tl.constexpr):
    """Return (first, past, first_full, past_full) along AXIS: queries `row` see no key outside
    [first, past), and all see the keys [first_full, past_full). low_row: 0 (LOW) or 5 (LOW2);
    batch: Bm; number: the batch row."""
    # An empty interval has no hull, and leaves no intersection.
    valid = row < seqlen_q
    base = queries + (tl.cast(low_row, tl.int64) * batch + number) * seqlen_q
    low = tl.load(base + row, mask=valid, other=0)
    high = tl.load(base + tl.cast(batch, tl.int64) * seqlen_q + row, mask=valid, other=0)
    empty = low >= high
    low = tl.where(empty, INT_MAX, low)
    high = tl.where(empty, -1, high)
    first = tl.min(low, AXIS)
    past = tl.max(high, AXIS)
    first_full = tl.max(tl.where(valid, low, -1), AXIS)
    past_full = tl.min(tl.where(valid, high, INT_MAX), AXIS)
    return first, past, first_full, past_full


@triton.jit
def _key_summary(
    keys, out, number, batch, program, seqlen_k, tiles, BLOCK: tl.constexpr, TOKENS: tl.constexpr
):
    """Store the least and the greatest position of the keys of TOKENS // BLOCK tiles in out (2, Bm,
    tiles)."""
    tile = program * (TOKENS // BLOCK) + tl.arange(0, TOKENS // BLOCK)
    key = tile[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    position = tl.load(keys + number * seqlen_k + key, mask=key < seqlen_k, other=0)
    least = tl.min(tl.where(key < seqlen_k, position, INT_MAX), 1)
    greatest = tl.max(tl.where(key < seqlen_k, position, -1), 1)
    tl.store(out + number * tiles + tile, least, mask=tile < tiles)
    tl.store(out + (batch + number) * tiles + tile, greatest, mask=tile < tiles)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def summary_kernel(
    queries, keys, query_summary, group_summary, fwd_summary, dq_summary, batch, seqlen_q, seqlen_k,
    tiles_q,
    tiles_fwd_k, tiles_dq_k, programs_q, programs_fwd_k, programs_dq_k,
    TWO: tl.constexpr, HAS_KEYS: tl.constexpr, BLOCK_Q: tl.constexpr, FWD_BLOCK_K: tl.constexpr,
    DQ_BLOCK_K: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Kernel: a program summarises TOKENS queries or TOKENS keys. For queries it stores the
    results of `interval` for each tile of BLOCK_Q in query_summary (4 or 8, Bm, tiles), and the
    least first and greatest past of all its tiles in group_summary (2, Bm, programs_q). For keys it
    stores each tile's least and greatest position in fwd_summary or dq_summary (2, Bm, tiles).
    The other arguments are plan_kernel's."""
    programs = programs_q + programs_fwd_k + programs_dq_k
    number = (tl.program_id(0) // programs).to(tl.int64)
    program = tl.program_id(0) % programs
    if program < programs_q:
        tile = program * (TOKENS // BLOCK_Q) + tl.arange(0, TOKENS // BLOCK_Q)
        row = tile[:, None] * BLOCK_Q + tl.arange(0, BLOCK_Q)[None, :]
        out = query_summary + number * tiles_q + tile
        step = tl.cast(batch, tl.int64) * tiles_q
        inside = tile < tiles_q
        first = INT_MAX
        past = -1
        for pair in tl.static_range(2 if TWO else 1):
            summary = interval(queries, row, 5 * pair, batch, number, seqlen_q, 1)
            for item in tl.static_range(4):
                tl.store(out + (4 * pair + item) * step, summary[item], mask=inside)
            first = tl.minimum(first, tl.min(summary[0], 0))
            past = tl.maximum(past, tl.max(summary[1], 0))
        tl.store(group_summary + number * programs_q + program, first)
        tl.store(group_summary + (batch + number) * programs_q + program, past)
    else:
        if HAS_KEYS:
            program -= programs_q
            if program < programs_fwd_k:
                _key_summary(
                    keys,
                    fwd_summary,
                    number,
                    batch,
                    program,
                    seqlen_k,
                    tiles_fwd_k,
                    FWD_BLOCK_K,
                    TOKENS,
                )
            else:
                program -= programs_fwd_k
                _key_summary(
                    keys,
                    dq_summary,
                    number,
                    batch,
                    program,
                    seqlen_k,
                    tiles_dq_k,
                    DQ_BLOCK_K,
                    TOKENS,
                )
