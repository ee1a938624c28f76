"""PTX instructions that Gluon does not offer: named barriers, fast approximations,
fences against the compiler."""

import math
import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_EXP2 = gl.constexpr("\n".join(f"ex2.approx.ftz.f32 ${i}, ${8 + i};" for i in range(8)))
_EXP2_CONSTRAINTS = gl.constexpr(",".join(["=f"] * 8 + ["f"] * 8))
CAPPED_BOUND = 0.5
_COEFFICIENTS = [0.9242340591251537, 0.2756131645768112, 0.09892209397347329, 0.04337248314201259]
_PACK = 16


@gluon.jit
def barrier(OP: gl.constexpr, name):
    """Arrive at hardware barrier number `name` (9 to 15: Triton uses the low ones) of 256 threads.
    OP "sync": also wait for all of them; "arrive": continue without waiting."""
    gl.inline_asm_elementwise(
        "bar." + OP + " $1, $2; mov.u32 $0, 0;",
        "=r,r,r",
        [gl.to_tensor(name), gl.to_tensor(256)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def exp2(x):
    """Return 2^x of a float32 tile with at least 8 numbers a thread."""
    return gl.inline_asm_elementwise(
        _EXP2, _EXP2_CONSTRAINTS, [x], dtype=gl.float32, is_pure=True, pack=8
    )


@gluon.jit
def exp2_few(x):
    """Return 2^x of a float32 tile that may have fewer than 8 numbers a thread."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


# b tanh(a s) - m of 16 products s, in few instructions. Up to a s = 0.5, where scores mostly are,
# by s times a minimax polynomial of four terms in d = (0.5 / a)^2 - s^2, whose sign chooses: exp2
# and reciprocal, which are slow, are not used. Where one of a warp's numbers is larger, by 1 - 2 /
# (1 + e^2x), exact at both ends. Both are within 3e-7 b (tests/kernels/test_hopper_ptx.py). a, b
# and m are in the coefficients, which the host computes.
def capped_terms(a: float, b: float, m: float) -> tuple[float, ...]:
    """Return the 8 coefficients from which `capped` computes b tanh(a s) - m; float32
    allows a from 1e-4 to 1e3."""
    return (
        a,
        b,
        m,
        (CAPPED_BOUND / a) ** 2,
        *(c * b * a ** (2 * i + 1) for i, c in enumerate(_COEFFICIENTS)),
    )


def _number(x: float) -> str:
    """Return a float32 as a PTX literal, such as 0f3F800000 for 1."""
    return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


def _capped_ptx(count: int) -> str:
    numbers = range(count)
    y, s = [f"${i}" for i in numbers], [f"${count + i}" for i in numbers]
    a, b, m, bound, *terms = [f"${count * (2 + i)}" for i in range(4 + len(_COEFFICIENTS))]
    lines = [
        "{ .reg .pred slow;",
        f".reg .f32 n<{count}>, p<{count}>, t<3>;",
        f".reg .b32 d<{count}>, m<4>;",
    ]
    lines += [f"neg.f32 n{i}, {s[i]};" for i in numbers]
    lines += [f"fma.rn.f32 d{i}, n{i}, {s[i]}, {bound};" for i in numbers]
    # The signs of all, or'ed; three numbers at a time.
    lines += [f"lop3.b32 m{i}, d{3 * i}, d{3 * i + 1}, d{3 * i + 2}, 0xFE;" for i in range(4)]
    rest = [f"d{i}" for i in range(12, count)]
    lines += [
        f"lop3.b32 m{i}, m{i}, {rest[2 * i]}, {rest[2 * i + 1]}, 0xFE;"
        for i in range(len(rest) // 2)
    ]
    lines += ["lop3.b32 m0, m0, m1, m2, 0xFE;", "or.b32 m0, m0, m3;"]
    lines += [
        "setp.lt.s32 slow, m0, 0;",
        "vote.sync.any.pred slow, slow, 0xffffffff;",
        "@slow bra.uni LARGE;",
    ]
    highest, second, *others = reversed(terms)
    lines += [f"fma.rn.f32 p{i}, {highest}, d{i}, {second};" for i in numbers]
    for term in others:
        lines += [f"fma.rn.f32 p{i}, p{i}, d{i}, {term};" for i in numbers]
    lines += [f"neg.f32 t0, {m};"]
    lines += [f"fma.rn.f32 {y[i]}, p{i}, {s[i]}, t0;" for i in numbers]
    lines += ["bra.uni DONE;", "LARGE:", f"mul.f32 t0, {a}, {_number(2 * math.log2(math.e))};"]
    lines += [f"sub.f32 t1, {b}, {m};", f"mul.f32 t2, {b}, {_number(-2.0)};"]
    lines += [f"mul.f32 p{i}, {s[i]}, t0;" for i in numbers]
    lines += [f"ex2.approx.ftz.f32 p{i}, p{i};" for i in numbers]
    lines += [f"add.f32 p{i}, p{i}, {_number(1.0)};" for i in numbers]
    lines += [f"rcp.approx.ftz.f32 p{i}, p{i};" for i in numbers]
    lines += [f"fma.rn.f32 {y[i]}, p{i}, t2, t1;" for i in numbers]
    return "\n".join([*lines, "DONE: }"])


_CAPPED = gl.constexpr(_capped_ptx(_PACK))
_CAPPED_CONSTRAINTS = gl.constexpr(
    ",".join(["=f"] * _PACK + ["f"] * (_PACK * (5 + len(_COEFFICIENTS))))
)


@gluon.jit
def capped(s, terms):
    """Return b tanh(a s) - m for a float32 tile s of at least 16 numbers a thread. terms:
    capped_terms(a, b, m)."""
    # Warps must be whole.
    LAYOUT: gl.constexpr = s.type.layout
    return gl.inline_asm_elementwise(
        _CAPPED,
        _CAPPED_CONSTRAINTS,
        [
            s,
            gl.full(s.shape, terms[0], gl.float32, LAYOUT),
            gl.full(s.shape, terms[1], gl.float32, LAYOUT),
            gl.full(s.shape, terms[2], gl.float32, LAYOUT),
            gl.full(s.shape, terms[3], gl.float32, LAYOUT),
            gl.full(s.shape, terms[4], gl.float32, LAYOUT),
            gl.full(s.shape, terms[5], gl.float32, LAYOUT),
            gl.full(s.shape, terms[6], gl.float32, LAYOUT),
            gl.full(s.shape, terms[7], gl.float32, LAYOUT),
        ],
        dtype=gl.float32,
        is_pure=True,
        pack=16,
    )


@gluon.jit
def opaque(x):
    """Return x, an int32, unchanged, in a way that keeps the compiler from computing
    earlier what follows from x."""
    # For rare branches: what the compiler computes ahead for them takes registers from
    # the loop around them.
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def stay(x):
    """Return x, a float32, unchanged, in a way that keeps Triton and LLVM from computing
    early what follows from x."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def packed(x, DTYPE: gl.constexpr):
    """Round a float32 tile to DTYPE (16 bits) and put two neighboring columns into each
    int32: (rows, columns / 2)."""
    ROWS: gl.constexpr = x.shape[0]
    PAIRS: gl.constexpr = x.shape[1] // 2
    KIND: gl.constexpr = "f16" if gl.float16 == DTYPE else "bf16"
    even, odd = gl.split(x.reshape([ROWS, PAIRS, 2]))
    return gl.inline_asm_elementwise(
        "cvt.rn." + KIND + "x2.f32 $0, $2, $1;",
        "=r,f,f",
        [even, odd],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def unpacked(x, DTYPE: gl.constexpr):
    """Convert int32 (rows, columns / 2), two numbers each, as `packed` makes them, to
    (rows, columns) of DTYPE."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1] * 2
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.join(even, odd).reshape([ROWS, COLUMNS]).to(DTYPE, bitcast=True)


@gluon.jit
def log2(x):
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def stores_done():
    """Wait until this thread's TMA stores are in global memory (tma.store_wait: until
    their sources are read)."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def stores_of_warpgroup_done(name):
    """Wait, in all 128 threads, until the TMA stores of each are in global memory. name: of a
    hardware barrier that no other warp uses."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.sync $1, 128; mov.u32 $0, 0;",
        "=r,r,~{memory}",
        [gl.to_tensor(name)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def note(notes, PLACE: gl.constexpr, values):
    """Store a tuple of integers and addresses in `notes`, int64 words of shared
    memory, from index PLACE on."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for i in gl.static_range(len(values)):
        notes.index(PLACE + i).store(
            gl.full([1], gl.to_tensor(values[i]).to(gl.int64), gl.int64, layout=ONE)
        )


@gluon.jit
def noted(notes, PLACE: gl.constexpr):
    """Load the integer that `note` stored at index PLACE of `notes`, int64
    words of shared memory."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(notes.index(PLACE).load(ONE), 0)
