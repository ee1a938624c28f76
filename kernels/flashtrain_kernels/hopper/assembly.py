"""The PTX that Gluon has no name for: named barriers, and powers of two shared out between two kinds of units."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# 2^f for f in [-1/2, 1/2], least relative error: of degree 4, 3e-6. The constant is 1, so that 2^0 is exactly 1.
_POLYNOMIAL = (1.0, 0.69312419, 0.24024099, 0.05590643, 0.00958285)
_PACK = 8


@gluon.jit
def barrier_wait(name, THREADS: gl.constexpr):
    """Wait at named barrier `name` (9 to 15: Triton uses the low ones) until THREADS threads have come to it."""
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.u32 $0, 0;",
        "=r,r,r",
        [gl.to_tensor(name), gl.to_tensor(THREADS)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def barrier_signal(name, THREADS: gl.constexpr):
    """Come to named barrier `name` without waiting."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, $2; mov.u32 $0, 0;",
        "=r,r,r",
        [gl.to_tensor(name), gl.to_tensor(THREADS)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


def _polynomial(result: str, argument: str) -> str:
    """PTX for result = 2^argument on the FMA units: 2^integer by the exponent's bits, 2^fraction by a polynomial.

    Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits. Below -127 the result is 0, as the exponent's
    bits then cancel those of the polynomial's 1.
    """
    *rest, last = (f"0f{_bits(c):08X}" for c in _POLYNOMIAL)
    steps = [f"fma.rn.ftz.f32 p, p, f, {c};" for c in reversed(rest)]
    return " ".join(
        [
            "{ .reg .f32 x, t, f, p; .reg .b32 i, b;",
            f"max.NaN.ftz.f32 x, {argument}, 0fC2FE0000;",
            "add.rn.ftz.f32 t, x, 0f4B400000;",
            "mov.b32 i, t;",
            "sub.rn.ftz.f32 t, t, 0f4B400000;",
            "sub.rn.ftz.f32 f, x, t;",
            f"mov.f32 p, {last};",
            *steps,
            "mov.b32 b, p;",
            "shl.b32 i, i, 23;",
            "add.s32 b, b, i;",
            f"mov.b32 {result}, b; }}",
        ]
    )


def _bits(x: float) -> int:
    import struct

    return struct.unpack("<I", struct.pack("<f", x))[0]


def _exp2_assembly(share: int) -> str:
    lines = []
    for i in range(_PACK):
        # Spread evenly, so that both kinds of units have work all the time.
        by_polynomial = (i + 1) * share // _PACK > i * share // _PACK
        result, argument = f"${i}", f"${_PACK + i}"
        lines.append(_polynomial(result, argument) if by_polynomial else f"ex2.approx.ftz.f32 {result}, {argument};")
    return "\n".join(lines)


# One for each number of eight that go by the polynomial.
_EXP2 = gl.constexpr(tuple(_exp2_assembly(share) for share in range(_PACK + 1)))
_EXP2_CONSTRAINTS = gl.constexpr(",".join(["=f"] * _PACK + ["f"] * _PACK))


@gluon.jit
def exp2(x, SHARE: gl.constexpr):
    """2^x of a tile of float32 with 8 numbers or more a thread, SHARE of every eight by a polynomial.

    The units for exponentials take 16 numbers a clock, as long as the tensor cores need for their products at D = 64.
    """
    return gl.inline_asm_elementwise(_EXP2[SHARE], _EXP2_CONSTRAINTS, [x], dtype=gl.float32, is_pure=True, pack=8)


@gluon.jit
def exp2_few(x):
    """2^x of a few numbers a thread."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def opaque(x):
    """x, an int32, in a way that nothing computed from it can be moved to an earlier place in the program.

    For rare branches: what the compiler computes ahead for them takes registers from the loop around them.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def log2(x):
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def stores_done():
    """Wait until all that this thread's TMA stores write is in memory (tma.store_wait: until it has been read)."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
