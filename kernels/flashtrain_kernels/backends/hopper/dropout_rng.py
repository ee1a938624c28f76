"""Dropout in the Hopper kernels: which calls they serve, and random numbers in the
layout of wgmma's results."""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ... import philox
from ...masks import Sequences
from ...options import Options
from ..portable.dropout_rng import group_of
from ..portable.launch import slope_row
from .alibi import why_not_lean
from .assembly import opaque
from .softcap import why_no_softcap

_MULTIPLIER = gl.constexpr(philox.MULTIPLIER)
_WIDTHS = (64, 128)  # head dimensions


def why_not_change(q: Tensor, k: Tensor, options: Options) -> str | None:
    """Return None if the kernels serve this call's dropout, ALiBi, bias and
    softcap, else the reason."""
    if options.dropout_p > 0:
        return why_not_drop(q, k, options)
    if options.alibi_slopes is not None:
        return why_not_lean(q, options)
    if options.bias is not None:
        return "no bias"
    return why_no_softcap(options) if options.softcap > 0 else None


def why_not_drop(q: Tensor, k: Tensor, options: Options) -> str | None:
    """Return None if the kernels serve this call with dropout, else the reason. q (B, Sq,
    H, D), k (B, Sk, K, D)."""
    if options.softcap > 0 or options.bias is not None or options.alibi_slopes is not None:
        return "no dropout together with softcap, ALiBi or bias"
    if q.shape[3] not in _WIDTHS:
        return "dropout with head dimensions 64 and 128 only"
    if isinstance(options.mask, Sequences):
        # Positions count from a sequence's first key; with one cu_seqlens queries and
        # keys begin together.
        if not same_ends(options.mask):
            return (
                "no dropout of packed sequences whose queries have other cu_seqlens than their keys"
            )
    elif options.mask is not None:
        return "no dropout with masks"
    elif (k.shape[1] - q.shape[1]) % 16:
        return "dropout only where Sk - Sq is a multiple of 16"
    return None


def same_ends(sequences: Sequences) -> bool:
    """Return whether queries and keys share one cu_seqlens tensor, compared by address:
    its values are not read."""
    one, other = sequences.cu_seqlens_q, sequences.cu_seqlens_k
    if one is other:
        return True
    return (
        one.device.type == "cuda"
        and one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
    )


def with_changes(
    arguments: tuple[Any, ...], tensor_at: int, number_at: int, options: Options
) -> tuple[Any, ...]:
    """Return a kernel's mask arguments with dropout's seed and threshold, or ALiBi's slopes and
    their stride, at indices tensor_at and number_at, which the mask does not use in such calls: the
    kernel needs no more arguments."""
    given = list(arguments)
    if options.dropout_p > 0:
        given[tensor_at], given[number_at] = options.seed, philox.threshold(options.dropout_p)
    elif options.alibi_slopes is not None:
        given[tensor_at], given[number_at] = options.alibi_slopes, slope_row(options.alibi_slopes)
    return tuple(given)


def keep_scale_of(options: Options) -> float:
    """Return the factor of the weights that dropout keeps: 1 / (the probability of keeping one)."""
    return 1.0 / philox.keep_probability(options.dropout_p)


def _rounds(group: int, first: int) -> list[str]:
    """Return PTX lines that run Philox's rounds from number `first` to the last on a counter's two
    words, in the registers l{group} and r{group}."""
    lines = []
    for number in range(first, philox.ROUNDS):
        lines += [
            f"mul.wide.u32 product, l{group}, {philox.MULTIPLIER};",
            "mov.b64 {low, high}, product;",
            f"xor.b32 high, high, r{group};",
            f"xor.b32 l{group}, high, k{number};",
            f"mov.b32 r{group}, low;",
        ]
    return lines


# One call of Philox2x32 draws for two queries by two keys that are 8 apart (philox.py). Of an
# accumulator with 16 rows a warp, eight neighbouring numbers of a thread are two such groups, where
# the tile begins at multiples of 16:
#     number  0    1        2        3            4        5        6            7
#     pair    r c  r c + 1  r + 8 c  r + 8 c + 1  r c + 8  r c + 9  r + 8 c + 8  r + 8 c + 9
def _assembly(queries_are_rows: bool) -> str:
    """Return PTX for eight numbers x >= 0 of which dropped ones become 0 (forward, where queries
    are rows) or -x (backward)."""
    # Operands, eight each: results, x, then of the forward the words of Philox's first round but
    # for the key's group, which follows, and of the backward the counter's two words; the key; the
    # threshold, in the upper half.
    given = 16
    lines = [
        "{ .reg .b32 high, low, upper, negative, l0, l1, r0, r1, "
        + ", ".join(f"k{number}" for number in range(philox.ROUNDS))
        + "; .reg .b64 product; .reg .pred keep;"
    ]
    key, threshold = (given + 24, given + 32) if queries_are_rows else (given + 16, given + 24)
    for number in range(philox.ROUNDS):
        lines.append(f"add.u32 k{number}, ${key}, {number * philox.KEY_STEP % 2**32};")
    for group in range(2):
        if queries_are_rows:
            lines += [
                f"add.u32 l{group}, ${given + 16}, {group};",
                f"xor.b32 l{group}, l{group}, ${given};",
                f"mov.b32 r{group}, ${given + 8};",
                *_rounds(group, 1),
            ]
        else:
            lines += [
                f"add.u32 l{group}, ${given}, {group};",
                f"mov.b32 r{group}, ${given + 8};",
                *_rounds(group, 0),
            ]
    for place in range(8):
        group, row, column = place & 1, place >> 1 & 1, place >> 2
        second_query, second_key = (row, column) if queries_are_rows else (column, row)
        word = f"{'r' if second_query else 'l'}{group}"
        if not second_key:
            lines.append(f"shl.b32 upper, {word}, 16;")
            word = "upper"
        lines.append(f"setp.ge.u32 keep, {word}, ${threshold};")
        if queries_are_rows:
            lines.append(f"selp.f32 ${place}, ${8 + place}, 0f00000000, keep;")
        else:
            lines += [
                f"neg.f32 negative, ${8 + place};",
                f"selp.f32 ${place}, ${8 + place}, negative, keep;",
            ]
    return "\n".join([*lines, "}"])


_FORWARD = gl.constexpr(_assembly(queries_are_rows=True))
_FORWARD_CONSTRAINTS = gl.constexpr(",".join(["=&f"] * 8 + ["f"] * 8 + ["r"] * 40))
_BACKWARD = gl.constexpr(_assembly(queries_are_rows=False))
_BACKWARD_CONSTRAINTS = gl.constexpr(",".join(["=&f"] * 8 + ["f"] * 8 + ["r"] * 32))


@gluon.jit
def upper_half(threshold):
    """Return a 16-bit threshold in the upper 16 bits of a uint32, to compare with a
    random word's upper 16 bits."""
    return (threshold << 16).to(gl.uint32, bitcast=True)


@gluon.jit
def keep_scale(threshold):
    """Return the factor of the weights that dropout keeps, for a 16-bit threshold."""
    return 65536.0 / (65536 - threshold).to(gl.float32)


@gluon.jit
def first_round(stream, query):
    """Compute the part of Philox's first round that query positions decide: (first word, still to
    be xored with a key's counter; second word). stream: the head's dropout_rng.Stream."""
    counter = group_of(query) + stream.first
    return gl.umulhi(counter, _MULTIPLIER) ^ stream.key, counter * _MULTIPLIER


@gluon.jit
def drop(weights, queries, first_key, stream, threshold):
    """Set the weights (queries, keys) that dropout drops to 0: those whose 16-bit random number is
    below threshold. queries: from `first_round`; first_key: position of the first column, a
    multiple of 16; stream: the head's dropout_rng.Stream."""
    LAYOUT: gl.constexpr = weights.type.layout
    BLOCK_K: gl.constexpr = weights.shape[1]
    word, other = queries
    key = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LAYOUT))
    counter = group_of(key) + ((first_key >> 1).to(gl.uint32, bitcast=True) + stream.second)
    return gl.inline_asm_elementwise(
        _FORWARD, _FORWARD_CONSTRAINTS,
        [weights, word[:, None], other[:, None], counter[None, :], stream.key,
            upper_half(threshold)],
        dtype=gl.float32, is_pure=True, pack=8,
    )  # fmt: skip


@gluon.jit
def draws_of(stream, key, first_query):
    """Return what dropout's random numbers are computed from: (Philox key, counter of the queries
    from first_query on, counters of the keys). key (keys, 1), first_query: positions, the latter a
    multiple of 16; stream: a Stream."""
    return (
        stream.key,
        (first_query >> 1).to(gl.uint32, bitcast=True) + stream.first,
        group_of(key) + stream.second,
    )


@gluon.jit
def mark_dropped(weights, tile, draws, threshold):
    """Negate the weights (keys, queries) that dropout drops. tile: the query tile's number;
    draws: draws_of tile 0."""
    LAYOUT: gl.constexpr = weights.type.layout
    BLOCK_Q: gl.constexpr = weights.shape[1]
    own, queries, keys = draws
    query = gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(0, LAYOUT))
    counter = group_of(query) + ((tile * (BLOCK_Q // 2)).to(gl.uint32, bitcast=True) + queries)
    return gl.inline_asm_elementwise(
        _BACKWARD, _BACKWARD_CONSTRAINTS,
        [weights, counter[None, :], keys, own, upper_half(threshold)],
        dtype=gl.float32, is_pure=True, pack=8,
    )  # fmt: skip


@gluon.jit
def kept_weights(marked, DTYPE: gl.constexpr):
    """Round weights to DTYPE, with 0 for the dropped ones, which `mark_dropped` made negative."""
    KIND: gl.constexpr = "f16x2" if gl.float16 == DTYPE else "bf16x2"
    bits = gl.inline_asm_elementwise(
        "cvt.rn.relu." + KIND + ".f32 $0, $2, $1;",
        "=r,f,f",
        [marked],
        dtype=gl.int16,
        is_pure=True,
        pack=2,
    )
    return bits.to(DTYPE, bitcast=True)


@gluon.jit
def score_gradients(marked, dp, delta, threshold):
    """Return the scores' gradient dS times c, c the probability of keeping a weight: p (dp - c
    delta) for a kept weight p, and -p c delta for a dropped one. marked: the weights as
    `mark_dropped` returns them."""
    # Computed anew for each tile: it would cost the loop a register.
    share = (65536 - opaque(threshold)).to(gl.float32) * (1.0 / 65536.0)
    return gl.maximum(marked, 0.0) * dp - gl.abs(marked) * (delta * share)
