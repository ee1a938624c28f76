"""ALiBi in the Hopper kernels: which calls with it they serve, and how it
changes a tile of scores."""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...masks import Sequences
from ...options import Options

_WIDTHS = (64, 128)  # head dimensions
_LOG2E = gl.constexpr(1.4426950408889634)
# A score loses slope * |p - j|, p being the query's position among the keys. Distances are counted
# from the tile's first column and are one multiplication of whole numbers below 2^24; the eight
# neighbouring numbers that a thread holds of an accumulator differ from the first one's by 1, 7, 8
# or 9 slopes. (rows, columns) from the first to each:
_PLACES = ((0, 0), (0, 1), (8, 0), (8, 1), (0, 8), (0, 9), (8, 8), (8, 9))
_BITS = {1: "3F800000", 7: "40E00000", 8: "41000000", 9: "41100000"}


def why_not_lean(q: Tensor, options: Options) -> str | None:
    """Return None if the Hopper kernels serve this call's ALiBi slopes, else the
    reason. q (B, Sq, H, D)."""
    if options.softcap > 0 or options.bias is not None or options.dropout_p > 0:
        return "no ALiBi together with softcap, bias or dropout"
    if q.shape[3] not in _WIDTHS:
        return "ALiBi with head dimensions 64 and 128 only"
    if options.mask is not None and not isinstance(options.mask, Sequences):
        return "no ALiBi with masks"
    slopes = options.alibi_slopes
    if slopes is not None and slopes.stride(-1) != 1:
        return "alibi_slopes with a last stride other than 1"
    return None


def _assembly() -> str:
    # Operands, eight each: results, scores, rows' and columns' distances times the slope, the
    # slope, minus its sign.
    row, column, slope, sign = 16, 24, 32, 40
    lines = [
        "{ .reg .f32 first, far, size, by1, by7, by8, by9;",
        f"sub.f32 first, ${row}, ${column};",
    ]
    lines += [f"mul.f32 by{number}, ${slope}, 0f{bits};" for number, bits in _BITS.items()]
    for place, (rows, columns) in enumerate(_PLACES):
        steps = rows - columns
        if steps:
            lines.append(f"{'add' if steps > 0 else 'sub'}.f32 far, first, by{abs(steps)};")
        lines += [
            f"abs.f32 size, {'far' if steps else 'first'};",
            f"fma.rn.f32 ${place}, size, ${sign}, ${8 + place};",
        ]
    return "\n".join([*lines, "}"])


_LEAN = gl.constexpr(_assembly())
_CONSTRAINTS = gl.constexpr(",".join(["=&f"] * 8 + ["f"] * 40))


@gluon.jit
def load_slope(slopes_ptr, stride, sequence, sequences, head, PACKED: gl.constexpr):
    """Load a query head's ALiBi slope times log2(e). stride: distance between two sequences'
    slopes, 0 if all share them; sequence: the number of the batch row or, if PACKED, of one of the
    `sequences` packed sequences (one beyond the last gets the last one's slope)."""
    if PACKED:  # tokens past the last end are one sequence more, without slopes of its own
        sequence = gl.minimum(sequence, sequences - 1)
    return gl.load(slopes_ptr + sequence.to(gl.int64) * stride + head) * _LOG2E


@gluon.jit
def lean(scores, distance, slope):
    """Subtract ALiBi's slope * |row's position - column's position| from a tile of scores
    whose columns' positions are consecutive. distance (rows, 1): each row's position minus
    that of the first column."""
    LAYOUT: gl.constexpr = scores.type.layout
    COLUMNS: gl.constexpr = scores.shape[1]
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT)).to(gl.float32) * slope
    row = distance.to(gl.float32) * slope
    sign = gl.where(slope < 0, 1.0, -1.0)
    return gl.inline_asm_elementwise(
        _LEAN,
        _CONSTRAINTS,
        [scores, row, column[None, :], slope, sign],
        dtype=gl.float32,
        is_pure=True,
        pack=8,
    )
