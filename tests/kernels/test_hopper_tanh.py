"""The tanh of the Hopper kernels' softcap, which is PTX that no CPU runs: computed here instruction by instruction."""

import importlib.util
import re
import struct

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def number(text: str) -> np.float32:
    return np.float32(struct.unpack(">f", bytes.fromhex(text[2:]))[0])


def run(ptx: str, values: np.ndarray, terms: tuple[float, ...]) -> tuple[np.ndarray, bool]:
    """What the PTX makes of (16, threads of one warp), and whether it took the way for large numbers."""
    registers = {f"${16 + i}": row.astype(np.float32) for i, row in enumerate(values)}
    registers |= {f"${16 * (2 + i)}": np.full(values.shape[1:], term, np.float32) for i, term in enumerate(terms)}
    lines = [line for line in re.sub(r"[{}]", "", ptx).replace("DONE: ", "DONE:").split("\n") if ".reg" not in line]
    labels = {line.strip().rstrip(":"): place for place, line in enumerate(lines) if line.strip().endswith(":")}

    def read(name: str) -> np.ndarray | np.float32 | int:
        if name.startswith("0f"):
            return number(name)
        return registers[name] if name in registers else int(name, 0)

    def joined(*numbers: np.ndarray) -> np.ndarray:
        assert all(x.dtype == np.float32 for x in numbers)
        return np.bitwise_or.reduce([x.view(np.int32) for x in numbers]).view(np.float32)

    large, place = False, 0
    with np.errstate(all="ignore"):
        while place < len(lines):
            line = lines[place].strip().rstrip(";")
            place += 1
            if not line or line.endswith(":"):
                continue
            if line.startswith("@slow bra.uni"):
                large = bool(registers["slow"])
                place = labels[line.split()[-1]] if large else place
                continue
            name, rest = line.split(" ", 1)
            if name == "bra.uni":
                place = labels[rest]
                continue
            target, *sources = rest.split(", ")
            if name == "vote.sync.any.pred":
                registers[target] = np.any(registers[sources[0]])
                continue
            given = [read(source) for source in sources]
            exact = [np.float64(x) for x in given]
            registers[target] = {
                "neg.f32": lambda x=given: -x[0],
                "lop3.b32": lambda x=given: joined(*x[:3]) if x[3] == 0xFE else None,
                "or.b32": lambda x=given: joined(*x),
                "setp.lt.s32": lambda x=given: x[0].view(np.int32) < x[1],
                "sub.f32": lambda x=given: x[0] - x[1],
                "mul.f32": lambda x=given: x[0] * x[1],
                "add.f32": lambda x=given: x[0] + x[1],
                "fma.rn.f32": lambda x=exact: np.float32(x[0] * x[1] + x[2]),
                "ex2.approx.ftz.f32": lambda x=exact: np.float32(np.exp2(x[0])),
                "rcp.approx.ftz.f32": lambda x=exact: np.float32(1 / x[0]),
            }[name]()
    return np.stack([registers[f"${i}"] for i in range(16)]), large


@pytest.fixture(scope="module")
def capped():
    from flashtrain_kernels.backends.hopper import assembly

    return assembly._CAPPED.value, assembly.capped_terms


@pytest.mark.parametrize("scale", [0.125 / 30, 0.0625 / 50, 2e-4, 500.0])
@pytest.mark.parametrize("reach", [0.499, 12.0, 1e4])
@pytest.mark.parametrize(("bound", "shift"), [(1.0, 0.0), (50 * np.log2(np.e), 100 - 50 * np.log2(np.e))])
def test_it_is_tanh_within_three_ten_millionths(scale, reach, bound, shift, capped):
    ptx, terms = capped
    products = np.random.default_rng(2).uniform(-reach / scale, reach / scale, (16, 4096)).astype(np.float32)
    products[:, :4] = np.array([0.0, reach / scale, -reach / scale, 1e-6], np.float32)
    got, was_large = run(ptx, products, terms(scale, bound, shift))
    assert was_large == (reach > 0.5)
    wanted = bound * np.tanh(products.astype(np.float64) * scale) - shift
    assert np.abs(got.astype(np.float64) - wanted).max() < 3e-7 * bound


@pytest.mark.parametrize("place", range(16))
def test_one_large_number_sends_its_warp_the_other_way_and_a_nan_stays_alone(place, capped):
    ptx, terms = capped
    products = np.random.default_rng(3).uniform(-100, 100, (16, 32)).astype(np.float32)
    for odd, value, way in (
        (130.0, np.tanh(130 / 240), True), (-np.inf, -1, True), (np.inf, 1, True), (np.nan, np.nan, None),
    ):  # fmt: skip
        products[place, 7] = odd
        got, large = run(ptx, products, terms(1 / 240, 40.0, 40.0))
        assert way is None or large == way
        exact = 40 * np.tanh(products.astype(np.float64) / 240) - 40
        exact[place, 7] = 40 * value - 40
        np.testing.assert_allclose(got, exact, rtol=0, atol=40 * 3e-7)
