"""The PTX that Gluon has no name for: named barriers, fast functions, and ways to keep things in their place."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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


_EXP2 = gl.constexpr("\n".join(f"ex2.approx.ftz.f32 ${i}, ${8 + i};" for i in range(8)))
_EXP2_CONSTRAINTS = gl.constexpr(",".join(["=f"] * 8 + ["f"] * 8))


@gluon.jit
def exp2(x):
    """2^x of a tile of float32 with 8 numbers or more a thread."""
    return gl.inline_asm_elementwise(_EXP2, _EXP2_CONSTRAINTS, [x], dtype=gl.float32, is_pure=True, pack=8)


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
def stay(x):
    """x, float32: what is computed from it is not moved to before this place, by Triton and LLVM at least."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def packed(x, DTYPE: gl.constexpr):
    """A tile of float32 rounded to DTYPE, neighbouring columns two to an int32: (rows, columns / 2)."""
    ROWS: gl.constexpr = x.shape[0]
    PAIRS: gl.constexpr = x.shape[1] // 2
    KIND: gl.constexpr = "f16" if gl.float16 == DTYPE else "bf16"
    even, odd = gl.split(x.reshape([ROWS, PAIRS, 2]))
    return gl.inline_asm_elementwise(
        "cvt.rn." + KIND + "x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpacked(x, DTYPE: gl.constexpr):
    """What `packed` packed: (rows, columns) of DTYPE."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1] * 2
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.join(even, odd).reshape([ROWS, COLUMNS]).to(DTYPE, bitcast=True)


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
