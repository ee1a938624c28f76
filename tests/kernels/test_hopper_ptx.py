"""The PTX that the Hopper kernels have for a softcap's tanh, dropout's draws and ALiBi, which no
CPU runs: interpreted here, it gives what it should to the numbers that a thread has of a tile."""

import importlib.util
import re
import struct

import numpy as np
import pytest
import torch

from flashtrain_kernels import philox

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
WORD = 2**32 - 1


def joined(*numbers):
    """The bits of any of them."""
    assert all(x.dtype == np.float32 for x in numbers)
    return np.bitwise_or.reduce([x.view(np.int32) for x in numbers]).view(np.float32)


INSTRUCTIONS = {
    "add.u32": lambda a, b: (a + b) & WORD,
    "xor.b32": lambda a, b: a ^ b,
    "mov.b32": lambda a: a,
    "mul.wide.u32": lambda a, b: a * b,
    "shl.b32": lambda a, b: (a << b) & WORD,
    "or.b32": joined,
    "lop3.b32": lambda a, b, c, table: {0xFE: joined(a, b, c)}[table],
    "setp.ge.u32": lambda a, b: a >= b,
    "setp.lt.s32": lambda a, b: a.view(np.int32) < b,
    "vote.sync.any.pred": lambda a, warp: np.any(a),
    "selp.f32": lambda a, b, keep: a if keep else b,
    "neg.f32": lambda a: -a,
    "add.f32": lambda a, b: a + b,
    "sub.f32": lambda a, b: a - b,
    "mul.f32": lambda a, b: a * b,
    "abs.f32": abs,
    "fma.rn.f32": lambda a, b, c: np.float32(np.float64(a) * np.float64(b) + np.float64(c)),
    "ex2.approx.ftz.f32": lambda a: np.float32(np.exp2(np.float64(a))),
    "rcp.approx.ftz.f32": lambda a: np.float32(1 / np.float64(a)),
}


def interpreted(ptx, operands, results):
    """The first results of PTX, and the labels that it branched to. operands: by number; an
    array: of each thread."""
    registers = {f"${number}": value for number, value in operands.items()}
    lines = [line.strip().rstrip(";") for line in ptx.replace("DONE: }", "DONE:").split("\n")]
    lines = [line for line in lines if line != "}" and ".reg" not in line]

    def value(name):
        if name.startswith("0f"):
            return np.float32(struct.unpack(">f", bytes.fromhex(name[2:]))[0])
        return registers[name] if name in registers else int(name, 0)

    branches, place = [], 0
    with np.errstate(all="ignore"):
        while place < len(lines):
            operation, *names = re.split(",? ", lines[place].removeprefix("@slow "))
            skipped = lines[place].startswith("@slow ") and not registers["slow"]
            place += 1
            if skipped or operation.endswith(":"):
                continue
            if operation == "bra.uni":
                branches += names
                place = lines.index(f"{names[0]}:")
            elif operation == "mov.b64":
                low, high, pair = (name.strip("{}") for name in names)
                registers[low], registers[high] = value(pair) & WORD, value(pair) >> 32
            else:
                registers[names[0]] = INSTRUCTIONS[operation](*map(value, names[1:]))
    return [registers[f"${place}"] for place in range(results)], branches


# --- tanh -----------------------------------------------------------------------------------------


def capped(products, *scales):
    """What becomes of (16, threads of one warp), and whether it took the way for large numbers."""
    from flashtrain_kernels.backends.hopper import assembly

    given = dict(enumerate(products.astype(np.float32), 16))
    for i, term in enumerate(assembly.capped_terms(*scales)):
        given[16 * (2 + i)] = np.full(products.shape[1:], term, np.float32)
    results, branches = interpreted(assembly._CAPPED.value, given, 16)
    return np.stack(results), "LARGE" in branches


@pytest.mark.parametrize("scale", [0.125 / 30, 0.0625 / 50, 2e-4, 500.0])
@pytest.mark.parametrize("reach", [0.499, 12.0, 1e4])
@pytest.mark.parametrize(
    ("bound", "shift"), [(1.0, 0.0), (50 * np.log2(np.e), 100 - 50 * np.log2(np.e))]
)
def test_a_softcap_is_tanh_within_three_ten_millionths(scale, reach, bound, shift):
    products = (
        np.random.default_rng(2)
        .uniform(-reach / scale, reach / scale, (16, 4096))
        .astype(np.float32)
    )
    products[:, :4] = np.array([0.0, reach / scale, -reach / scale, 1e-6], np.float32)
    got, was_large = capped(products, scale, bound, shift)
    assert was_large == (reach > 0.5)
    wanted = bound * np.tanh(products.astype(np.float64) * scale) - shift
    assert np.abs(got.astype(np.float64) - wanted).max() < 3e-7 * bound


@pytest.mark.parametrize("place", range(16))
def test_one_large_number_sends_its_warp_the_other_way_and_a_nan_stays_alone(place):
    products = np.random.default_rng(3).uniform(-100, 100, (16, 32)).astype(np.float32)
    for odd, value, way in (
        (130.0, np.tanh(130 / 240), True), (-np.inf, -1, True), (np.inf, 1, True),
        (np.nan, np.nan, None),
    ):  # fmt: skip
        products[place, 7] = odd
        got, large = capped(products, 1 / 240, 40.0, 40.0)
        assert way is None or large == way
        exact = 40 * np.tanh(products.astype(np.float64) / 240) - 40
        exact[place, 7] = 40 * value - 40
        np.testing.assert_allclose(got, exact, rtol=0, atol=40 * 3e-7)


# --- dropout and ALiBi ----------------------------------------------------------------------------
SEED, P = torch.tensor([-987654321987654321, 3, 2]), 0.4
# Eight neighbouring numbers of a thread: by how many rows and columns they lie from its first.
PLACES = [(0, 0), (0, 1), (8, 0), (8, 1), (0, 8), (0, 9), (8, 8), (8, 9)]
ROWS, COLUMNS = (torch.tensor(side) for side in zip(*PLACES, strict=True))
WEIGHTS = [1.0 + place for place in range(8)]


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
    # Every operand has eight numbers, of which the first are asked for.
    got, _ = interpreted(
        dropout_rng._assembly(queries_are_rows=True), dict(enumerate(WEIGHTS, 8)) | inputs, 8
    )
    wanted = kept(5, 7, row + ROWS, column + COLUMNS)
    assert got == [
        weight if keep else 0.0 for weight, keep in zip(WEIGHTS, wanted.tolist(), strict=True)
    ]


@pytest.mark.parametrize(("row", "column"), [(0, 0), (3, 6), (64 + 23, 128 + 2), (999, 48 + 4)])
def test_the_backwards_ptx_marks_what_the_mask_says(row, column):
    from flashtrain_kernels.backends.hopper import dropout_rng

    key, first, second = stream(0, 1)
    inputs = {
        16: (group(column) + first) & WORD, 24: (group(row) + second) & WORD, 32: key,
        40: philox.threshold(P) << 16
    }  # fmt: skip
    got, _ = interpreted(
        dropout_rng._assembly(queries_are_rows=False), dict(enumerate(WEIGHTS, 8)) | inputs, 8
    )
    wanted = kept(0, 1, column + COLUMNS, row + ROWS)
    assert got == [
        weight if keep else -weight for weight, keep in zip(WEIGHTS, wanted.tolist(), strict=True)
    ]


@pytest.mark.parametrize("slope", [0.25, -0.5, 0.0])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (-3, 6), (87, 2), (50, 52), (5, 118)])
def test_alibis_ptx_takes_slopes_times_distances(row, column, slope):
    from flashtrain_kernels.backends.hopper import alibi

    inputs = {16: row * slope, 24: column * slope, 32: slope, 40: 1.0 if slope < 0 else -1.0}
    got, _ = interpreted(alibi._assembly(), dict(enumerate(WEIGHTS, 8)) | inputs, 8)
    distances = [abs(row + rows - column - columns) for rows, columns in PLACES]
    assert got == [
        score - slope * distance for score, distance in zip(WEIGHTS, distances, strict=True)
    ]


def test_accumulators_lie_as_the_draws_take_them_to():
    from triton._C.libtriton import gluon_ir, ir
    from triton.experimental.gluon import language as gl

    context = ir.context()
    ir.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    for columns in (64, 128):
        layout = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
        linear = builder.to_linear_layout(layout._to_ir(builder), [64, columns])
        # Of a number of a thread bit 0 is the column's bit 0, bit 1 the row's bit 3, bit
        # 2 the column's bit 3.
        assert linear.reg_bases[:3] == [[0, 1], [8, 0], [0, 8]]
        # Where the thread's first number lies: bit 3 of both is 0.
        assert linear.lane_bases == [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
        assert all(
            row % 16 == column % 16 == 0
            for row, column in (*linear.reg_bases[3:], *linear.warp_bases)
        )
