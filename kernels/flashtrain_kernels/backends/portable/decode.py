"""The kernels that attend to the cache of flash_attn_with_kvcache, over parts of the
keys, and merge the parts.

B batch, Sq queries, Sn new keys, H query heads, K key/value heads, G = H / K, D head dimension
(BLOCK_D: padded to a power of two). A cache is P pages of L rows (P, L, K, D); a table (B, M) names
the pages of each sequence.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ...environment import release
from .append import NOT_SPECIALISED, Constants, load_turned, page_and_row, rotary_of, rotary_rows
from .launch import Launch, ceil_div, multiprocessors, padded, precision_of, slope_row
from .tiles import RECOMPUTE_BLOCK, has_nan, is_finite

# The row maximum of a row that has seen nothing yet. Finite, so that exp2(-inf -
# maximum) is 0 and never NaN.
_NOTHING = tl.constexpr(-3.0e38)
_LOG2E = math.log2(math.e)


@triton.jit
def _over_keys(
    q, first, past, k_base, v_base, k_strides, v_strides, table, size, pages, pad, length, low,
    high, position, slope,
    scale_log2, cap_in, cap_log2, RECOMPUTE: tl.constexpr, STEP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return (sums of weighted values, row sums, row maxima, counts) of online softmax over the
    keys [first, past). RECOMPUTE: masked inf and NaN values are kept out, and counts say, for each
    number of the output, how many inf and NaN values its row sees; else they are 0."""
    ROWS: tl.constexpr = C.rows
    BLOCK_V: tl.constexpr = C.block_v
    acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    reached = tl.zeros([ROWS, BLOCK_V], tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    row_max = tl.full([ROWS], _NOTHING, tl.float32)
    d = tl.arange(0, C.block_d)[None, :]
    column = tl.arange(0, C.block_v)[None, :]
    for start in tl.range(first, past, STEP):
        key = start + tl.arange(0, STEP)
        inside = key < length
        page, place = page_and_row(table, key + pad, inside, size, pages, C.paged)
        k = tl.load(
            (k_base + page * k_strides[0] + place * k_strides[1])[:, None] + d,
            mask=inside[:, None] & (d < C.head_dim), other=0.0,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision=C.precision)
        if C.softcap:
            scores = (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores * cap_in))) * cap_log2
        else:
            scores = scores * scale_log2
        if C.alibi:
            scores -= slope[:, None] * tl.abs(position[:, None] - key[None, :]).to(tl.float32)
        seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max
        v = tl.load(
            (v_base + page * v_strides[0] + place * v_strides[1])[:, None] + column,
            mask=inside[:, None] & (column < C.value_dim), other=0.0,
        )  # fmt: skip
        if RECOMPUTE:
            wrong = tl.where(is_finite(v), 0.0, 1.0).to(v.dtype)
            reached = tl.dot(seen.to(v.dtype), wrong, reached, input_precision=C.precision)
            v = tl.where(is_finite(v), v, 0.0).to(v.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=C.precision)
    return acc, row_sum, row_max, reached


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def attend_kernel(
    q, k_cache, v_cache, out, lse, lengths, leftpad, table, cos, sin, slopes, q_strides, k_strides,
    v_strides,
    cos_row, sin_row, angles, slope_row, table_row, sequences, seqlen_q, added, size, pages,
    columns, left, right,
    splits, scale_log2, cap_in, cap_log2, C: tl.constexpr,
):  # fmt: skip
    """Kernel: one program computes attention of C.rows of the Sq * G query rows over one part of a
    key head's keys. Grid (B * K, splits, tiles of rows). Fills out (splits, B, Sq, H, Dv), lse
    (splits, B, H, Sq). sequences: B; splits: parts; left, right: the window; scale_log2, cap_in,
    cap_log2: see launch.Arguments; others: see append_kernel."""
    # The Sq * G rows share a key head, query-major, and so read its keys once (grouped-query
    # decoding). With few programs the keys are divided into parts, which join_kernel merges by
    # their log-sum-exp (Flash-Decoding).
    ROWS: tl.constexpr = C.rows
    split = tl.program_id(1)
    kv_heads = tl.num_programs(0) // sequences
    batch = (tl.program_id(0) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    first_row = tl.program_id(2) * C.rows
    row = first_row + tl.arange(0, C.rows)
    query = row // C.group
    head = kv_head * C.group + row % C.group
    real = query < seqlen_q

    filled = tl.load(lengths + batch)
    pad = 0
    if C.leftpad:
        pad = tl.maximum(tl.load(leftpad + batch), 0)
    length = tl.maximum(tl.minimum(filled + added, size * columns) - pad, 0)
    position = length - seqlen_q + query
    low = tl.zeros([ROWS], tl.int32)
    high = tl.where(real, length, 0)
    first, past = 0, length
    first_query = first_row // C.group
    last_query = tl.minimum((first_row + C.rows - 1) // C.group, seqlen_q - 1)
    if C.left:
        low = tl.maximum(position - left, 0)
        first = tl.maximum(length - seqlen_q + first_query - left, 0)
    if C.right:
        high = tl.where(real, tl.minimum(position + right + 1, length), 0)
        past = tl.maximum(tl.minimum(length - seqlen_q + last_query + right + 1, length), 0)
    # This program's part: whole tiles, as many as the others'.
    first = first // C.keys * C.keys
    share = tl.cdiv(tl.cdiv(tl.maximum(past - first, 0), C.keys), splits) * C.keys
    first += split * share
    past = tl.minimum(first + share, past)

    q_pointers = q + batch * q_strides[0] + query.to(tl.int64) * q_strides[1] + head * q_strides[2]
    at = filled + tl.zeros([ROWS], tl.int32)
    if C.left or C.right:
        at += query
    at = tl.minimum(tl.maximum(at, 0), angles - 1).to(tl.int64)
    q_tile = load_turned(q_pointers, real, at, cos, sin, cos_row, sin_row, C)
    slope = tl.zeros([ROWS], tl.float32)
    if C.alibi:
        slope = (
            tl.load(slopes + batch * slope_row + head, mask=real, other=0.0) * 1.4426950408889634
        )
    k_base = k_cache + kv_head * k_strides[2]
    v_base = v_cache + kv_head * v_strides[2]
    table += batch * table_row
    acc, row_sum, row_max, _ = _over_keys(
        q_tile, first, past, k_base, v_base, k_strides, v_strides, table, size, pages, pad, length,
        low, high, position,
        slope, scale_log2, cap_in, cap_log2, False, C.keys, C,
    )  # fmt: skip
    if C.left or C.right:  # else every key is seen  # noqa: SIM102 - the first is decided while compiling
        if has_nan(acc):
            acc, row_sum, row_max, reached = _over_keys(
                q_tile, first, past, k_base, v_base, k_strides, v_strides, table, size, pages, pad,
                length, low, high,
                position, slope, scale_log2, cap_in, cap_log2, True, RECOMPUTE_BLOCK, C,
            )  # fmt: skip
            acc = tl.where(reached > 0, float("nan"), acc)

    empty = row_sum == 0
    total = tl.where(empty, 1.0, row_sum)
    heads = kv_heads * C.group
    at_row = ((split * sequences + batch) * seqlen_q + query) * heads + head
    column = tl.arange(0, C.block_v)[None, :]
    tl.store(
        out + at_row[:, None] * C.value_dim + column,
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=real[:, None] & (column < C.value_dim),
    )  # fmt: skip
    natural = tl.where(empty, float("-inf"), (row_max + tl.log2(total)) * 0.6931471805599453)
    tl.store(
        lse + ((split * sequences + batch) * heads + head) * seqlen_q + query, natural, mask=real
    )


@triton.jit(do_not_specialize=["rows", "seqlen_q", "heads", "splits"])
def join_kernel(
    parts, part_lse, out, lse, rows, seqlen_q, heads, splits, VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Kernel: one program merges the `splits` parts of one row (a query of one head; rows: B * Sq *
    H) to out and lse: lse = log(sum of exp(lse_i)), out = sum of exp(lse_i - lse) out_i. SPLITS:
    splits padded to a power of two."""
    row = tl.program_id(0).to(tl.int64)
    head = row % heads
    query = row // heads % seqlen_q
    batch = row // heads // seqlen_q
    at_lse = (batch * heads + head) * seqlen_q + query
    split = tl.arange(0, SPLITS)
    real = split < splits
    split = split.to(tl.int64)
    each = tl.load(part_lse + split * rows + at_lse, mask=real, other=float("-inf"))
    highest = tl.max(each, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(each - highest)
    total = tl.sum(weights, 0)
    safe = tl.where(total == 0, 1.0, total)
    column = tl.arange(0, BLOCK_V)
    mask = column < VALUE_DIM
    pointers = parts + (split * rows + row)[:, None] * VALUE_DIM + column[None, :]
    each_out = tl.load(pointers, mask=real[:, None] & mask[None, :], other=0.0)
    joined = tl.sum(each_out * (weights / safe)[:, None], 0)
    tl.store(out + row * VALUE_DIM + column, joined.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + at_lse, tl.where(total == 0, float("-inf"), highest + tl.log(safe)))


def attend_launches(
    out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor, leftpad: torch.Tensor | None, table: torch.Tensor, paged: bool,
    added: int,
    cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool, scale: float, left: int,
    right: int,
    softcap: float, slopes: torch.Tensor | None, splits: int,
) -> list[Launch]:  # fmt: skip
    """Return the launches that fill out (B, Sq, H, Dv) and lse (B, H, Sq). Arguments as in
    cache_operators.attend."""
    batch, seqlen_q, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    group, block_d, exact = heads // kv_heads, padded(head_dim), q.dtype == torch.float32
    value_dim = v_cache.shape[3]
    block_v = padded(value_dim)
    rows = seqlen_q * group
    tile = 16 if rows <= 16 or block_d > 128 or exact else 64
    keys = 16 if block_d > 256 else 32 if block_d > 128 or exact else 64
    constants = Constants(
        group, head_dim, block_d, value_dim, block_v, tile, keys, paged, leftpad is not None,
        0 if cos is None else 2 * cos.shape[1],
        interleaved, left >= 0, right >= 0, softcap > 0, slopes is not None,
        precision_of(q.dtype),
    )  # fmt: skip
    programs = ceil_div(rows, tile) * batch * kv_heads
    capacity = table.shape[1] * k_cache.shape[1]
    if splits == 0:
        splits = splits_for(programs, ceil_div(capacity, keys), paged, q.device)
    parts, part_lse = out, lse
    if splits > 1:
        parts = torch.empty((splits, *out.shape), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((splits, *lse.shape), dtype=torch.float32, device=q.device)
    compiling = {
        "num_warps": 4 if tile * block_d <= 2048 else 8,
        "num_stages": 3 if tile == 16 else 2,
    }
    if release() >= (3, 9) and block_d > 128:
        # It takes 108; without a limit 3.9 leaves ptxas 128 and two spill.
        compiling["maxnreg"] = 168
    first = Launch(
        kernel=attend_kernel,
        grid=(batch * kv_heads, splits, ceil_div(rows, tile)),
        args=(
            q, k_cache, v_cache, parts, part_lse, lengths, lengths if leftpad is None else leftpad,
            table,
            *rotary_of(cos, sin, q), lse if slopes is None else slopes, q.stride()[:3],
            k_cache.stride()[:3],
            v_cache.stride()[:3], *rotary_rows(cos, sin),
            slope_row(slopes), table.stride(0),
            batch, seqlen_q, added, k_cache.shape[1], k_cache.shape[0], table.shape[1],
            max(left, 0), max(right, 0),
            splits, scale * _LOG2E, scale / softcap if softcap else 0.0, softcap * _LOG2E,
        ),
        constants={"C": constants},
        options=compiling,
    )  # fmt: skip
    if splits == 1:
        return [first]
    count = batch * seqlen_q * heads
    return [first, Launch(
        kernel=join_kernel,
        grid=(count,),
        args=(parts, part_lse, out, lse, count, seqlen_q, heads, splits),
        constants={"VALUE_DIM": value_dim, "BLOCK_V": block_v,
            "SPLITS": 1 << (splits - 1).bit_length()},
        options={"num_warps": 4 if splits * block_v > 4096 else 1},
    )]  # fmt: skip


def splits_for(programs: int, tiles: int, paged: bool, device: torch.device) -> int:
    """Return into how many parts to divide the keys: enough for two programs on each
    multiprocessor, or four with pages, which wait longer for memory; at least four tiles of keys a
    part. More parts would start an incomplete second round of programs
    (kernels/dev/OPTIMISATION.md). programs: how many one part has; tiles: of keys, in all."""
    most = (4 if paged else 2) * multiprocessors(device)
    return max(1, min(most // max(programs, 1), tiles // 4, 128))


def attend(q: torch.Tensor, *call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate and compute (out (B, Sq, H, Dv), lse (B, H, Sq)). Arguments as
    in `attend_launches`."""
    v_cache = call[1]
    out = torch.empty((*q.shape[:3], v_cache.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    for launch in attend_launches(out, lse, q, *call):
        launch.run()
    return out, lse
