"""The Hopper kernels' draws, and their ALiBi, without a GPU: their PTX, interpreted, gives what the reference says to
the numbers that a thread has of a tile."""

import importlib.util
import re
import struct

import pytest
import torch

from flashtrain_kernels import philox

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
WORD = 2**32 - 1
# Eight neighbouring numbers of a thread: by how many rows and columns they lie from its first.
PLACES = [(0, 0), (0, 1), (8, 0), (8, 1), (0, 8), (0, 9), (8, 8), (8, 9)]
INSTRUCTIONS = {
    "add.u32": lambda a, b: (a + b) & WORD,
    "xor.b32": lambda a, b: a ^ b,
    "mov.b32": lambda a: a,
    "mul.wide.u32": lambda a, b: a * b,
    "shl.b32": lambda a, b: (a << b) & WORD,
    "setp.ge.u32": lambda a, b: a >= b,
    "selp.f32": lambda a, b, keep: a if keep else b,
    "neg.f32": lambda a: -a,
    "add.f32": lambda a, b: a + b,
    "sub.f32": lambda a, b: a - b,
    "mul.f32": lambda a, b: a * b,
    "abs.f32": abs,
    "fma.rn.f32": lambda a, b, c: a * b + c,
}
SEED = torch.tensor([-987654321987654321, 3, 2])
P = 0.4


def interpreted(assembly: str, given: dict[int, int | float]) -> list[float]:
    """The eight results of PTX of the few kinds that dropout_rng.py writes. given: operands by number."""
    registers: dict[str, int | float | bool] = {f"${number}": value for number, value in given.items()}

    def value(name):
        if name in registers:
            return registers[name]
        return struct.unpack(">f", bytes.fromhex(name[2:]))[0] if name.startswith("0f") else int(name)

    for line in assembly.split("\n"):
        if line.startswith("{ .reg") or line == "}":
            continue
        operation, rest = line.rstrip(";").split(" ", 1)
        pair = re.fullmatch(r"\{(\w+), (\w+)\}, (\w+)", rest)
        if operation == "mov.b64":
            registers[pair[1]], registers[pair[2]] = value(pair[3]) & WORD, value(pair[3]) >> 32
            continue
        target, *names = rest.split(", ")
        x = [value(name) for name in names]
        registers[target] = INSTRUCTIONS[operation](*x)
    return [registers[f"${place}"] for place in range(8)]


def stream(sequence: int, head: int) -> list[int]:
    zero = torch.tensor(0)
    counter = (SEED[1] + sequence, SEED[2] + head, zero, zero)
    return [word.item() for word in philox.philox(SEED[0], counter)[:3]]


def group(position: int) -> int:
    return position // 16 * 8 + position % 8


def kept(sequence, head, queries, keys):
    return philox.keep_mask(SEED, torch.tensor(sequence), torch.tensor(head), queries, keys, P)


@pytest.mark.parametrize(("row", "column"), [(0, 0), (3, 6), (64 + 23, 128 + 2), (999, 48 + 4)])
def test_the_forwards_ptx_drops_what_the_mask_says(row, column):
    from flashtrain_kernels.backends.hopper import dropout_rng

    key, first, second = stream(5, 7)
    product = philox.MULTIPLIER * ((group(row) + first) & WORD)
    inputs = {
        16: product >> 32 ^ key, 24: product & WORD, 32: (group(column) + second) & WORD, 40: key,
        48: philox.threshold(P) << 16,
    }  # fmt: skip
    weights = [1.0 + place for place in range(8)]
    # Every operand has eight numbers, of which the first are asked for.
    given = dict(enumerate(weights, 8)) | inputs
    got = interpreted(dropout_rng._assembly(queries_are_rows=True), given)
    rows, columns = (torch.tensor(side) for side in zip(*PLACES, strict=True))
    wanted = kept(5, 7, row + rows, column + columns)
    assert got == [weight if keep else 0.0 for weight, keep in zip(weights, wanted.tolist(), strict=True)]


@pytest.mark.parametrize(("row", "column"), [(0, 0), (3, 6), (64 + 23, 128 + 2), (999, 48 + 4)])
def test_the_backwards_ptx_marks_what_the_mask_says(row, column):
    from flashtrain_kernels.backends.hopper import dropout_rng

    key, first, second = stream(0, 1)
    inputs = {
        16: (group(column) + first) & WORD, 24: (group(row) + second) & WORD, 32: key, 40: philox.threshold(P) << 16
    }  # fmt: skip
    weights = [1.0 + place for place in range(8)]
    got = interpreted(dropout_rng._assembly(queries_are_rows=False), dict(enumerate(weights, 8)) | inputs)
    rows, columns = (torch.tensor(side) for side in zip(*PLACES, strict=True))
    wanted = kept(0, 1, column + columns, row + rows)
    assert got == [weight if keep else -weight for weight, keep in zip(weights, wanted.tolist(), strict=True)]


@pytest.mark.parametrize("slope", [0.25, -0.5, 0.0])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (-3, 6), (87, 2), (50, 52), (5, 118)])
def test_alibis_ptx_takes_slopes_times_distances(row, column, slope):
    from flashtrain_kernels.backends.hopper import alibi

    scores = [1.0 + place for place in range(8)]
    inputs = {16: row * slope, 24: column * slope, 32: slope, 40: 1.0 if slope < 0 else -1.0}
    got = interpreted(alibi._assembly(), dict(enumerate(scores, 8)) | inputs)
    distances = [abs(row + rows - column - columns) for rows, columns in PLACES]
    assert got == [score - slope * distance for score, distance in zip(scores, distances, strict=True)]


def test_accumulators_lie_as_the_draws_take_them_to():
    from triton._C.libtriton import gluon_ir, ir
    from triton.experimental.gluon import language as gl

    context = ir.context()
    ir.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    for columns in (64, 128):
        layout = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
        linear = builder.to_linear_layout(layout._to_ir(builder), [64, columns])
        # Of a number of a thread bit 0 is the column's bit 0, bit 1 the row's bit 3, bit 2 the column's bit 3.
        assert linear.reg_bases[:3] == [[0, 1], [8, 0], [0, 8]]
        # Where the thread's first number lies: bit 3 of both is 0.
        assert linear.lane_bases == [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
        assert all(row % 16 == column % 16 == 0 for row, column in (*linear.reg_bases[3:], *linear.warp_bases))
