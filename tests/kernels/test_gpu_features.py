"""Every feature on a GPU, alone and with every other: as exact as torch's attention, and
the same in every run."""

import math

import pytest
import torch
from attention_cases import BLOCKS, MASKS, Case, case_of, expected, ours, pairwise, run
from gpu_checks import DEVICE, NEEDS_GPU, assert_as_exact_as_torch, assert_same, error

import flashtrain_kernels as fk
from flashtrain_kernels import sinks

pytestmark = NEEDS_GPU
BF16, FP16 = torch.bfloat16, torch.float16


def feature_case(factors: dict) -> Case:
    return case_of(factors, 397, 333, 461, heads=(4, 4), head_dim=64)


# Not (1, 1, 1, 1): one number added to all scores changes nothing, so its gradient is rounding
# alone (in float32 the interpreter's cases hold it to that).
BIASES = [(0, 0, 0, 0), (1, 0, 1, 0), (0, 1, 0, 1)]
ALONE = [{"mask": mask} for mask in ("window", "window causal", *MASKS, *BLOCKS)]
ALONE += [{"softcap": 3.0}, {"alibi": "alibi"}, {"alibi": "alibi_rows"}, {"dropout": 0.3}]
ALONE += [{"bias": bias} for bias in BIASES]
# One mask of each kind that kernels are compiled for; each pair of features
# meets one of the dtypes.
TOGETHER = pairwise(
    {
        "mask": [
            "causal",
            "window",
            "causal document",
            "global window",
            "shuffled",
            "blocks causal",
        ],
        "softcap": [0.0, 3.0],
        "alibi": ["", "alibi", "alibi_rows"],
        "bias": [None, (0, 0, 0, 0), (1, 0, 1, 0)],
        "dropout": [0.0, 0.3],
        "heads": [(4, 4), (4, 2)],
        "head_dim": [64, 128],
        "dtype": [BF16, FP16],
    }
)


@pytest.mark.parametrize(
    "factors",
    TOGETHER,
    ids=lambda factors: f"{feature_case(factors)}-{str(factors['dtype']).removeprefix('torch.')}",
)
def test_every_two_features_together_are_as_exact_as_torchs_attention(factors):
    assert_as_exact_as_torch(feature_case(factors), factors["dtype"])


# Scores far beyond the softcap, around it and far below: the Hopper kernels' tanh has a way for
# each. Each meets every width of heads, 64, 128 and 256; heads that are padded to them meet one.
CAPPED = [
    Case(2, 333, 461, 4, 2, head_dim, mask, softcap)
    for softcap, head_dim, mask in (
        (0.3, 64, "causal"),
        (3.0, 64, "causal"),
        (30.0, 64, "causal"),
        (0.3, 72, "window"),
        (3.0, 128, "full"),
        (0.3, 128, "causal"),
        (30.0, 128, "causal"),
        (3.0, 136, "causal"),
        (0.3, 256, "full"),
        (30.0, 256, "full"),
    )
] + [
    Case(2, 397, 397, 4, 2, 128, "causal document", 30.0),
    Case(2, 397, 397, 4, 4, 64, "global window", 30.0),
    Case(2, 397, 397, 4, 2, 256, "causal document", 3.0),
]
# Head dimensions that are computed as 128 and as 256, with tiles that the ends cut.
PADDED = [
    Case(2, 333, 461, 4, 2, head_dim, "causal")
    for head_dim in (72, 80, 96, 104, 120, 136, 160, 192, 216, 248)
]
PADDED += [
    Case(2, 397, 397, 4, 2, head_dim, mask)
    for head_dim in (96, 200, 256)
    for mask in ("causal document", "global window", "shuffled")
]
PADDED += [Case(2, 461, 333, 2, 2, 72, "window"), Case(1, 333, 461, 4, 4, 200, "full")]


@pytest.mark.parametrize("case", [*map(feature_case, ALONE), *CAPPED], ids=str)
def test_each_feature_is_as_exact_as_torchs_attention(case, path):
    assert_as_exact_as_torch(case, BF16)


@pytest.mark.parametrize("case", PADDED, ids=str)
def test_head_dimensions_between_are_as_exact_as_torchs_attention(case, path):
    if path == "portable":
        pytest.skip("test_gpu.py has the portable kernels' head dimensions")
    assert_as_exact_as_torch(case, BF16)


# Positions of keys: other ones in each row of the batch, queries and whole tiles of them that see
# nothing, any lengths.
PARTS = [
    (Case(2, 333, 461, 4, 2, 64, "part"), BF16), (Case(3, 461, 333, 2, 2, 96, "part"), BF16),
    (Case(2, 600, 1100, 4, 1, 128, "part"), BF16), (Case(1, 257, 63, 2, 2, 128, "part"), FP16),
    (Case(2, 333, 461, 4, 4, 64, "part", 3.0), FP16),
    (Case(2, 333, 461, 4, 2, 128, "part", 3.0), BF16),
    (Case(2, 333, 461, 4, 2, 256, "part document"), BF16),
    (Case(2, 461, 333, 4, 4, 200, "part document", 3.0), BF16),
]  # fmt: skip


@pytest.mark.parametrize(("case", "dtype"), PARTS, ids=str)
def test_masks_with_positions_of_keys_are_as_exact_as_torchs_attention(case, dtype, path):
    inputs = case.inputs(dtype, DEVICE)
    line = fk.explain(*inputs, **case.options(DEVICE))
    if path == "hopper":  # in both passes
        assert line.startswith("Hopper kernels")
        assert "portable" not in line
    assert_as_exact_as_torch(case, dtype)


def assert_rounded(got, wanted, dtype, names):
    """Within what rounding these leaves of them."""
    for name in names:
        bound = 4 * torch.finfo(dtype).eps * max(wanted[name].abs().max().item(), 0.01)
        assert error(got, wanted, name) <= bound, name


def the_same_ten_times(inputs, options):
    """The results of a call, which ten runs give bit for bit."""
    first = run(fk.flash_attn_func, inputs, options)
    for _ in range(9):
        again = run(fk.flash_attn_func, inputs, options)
        for name, value in first.items():
            assert torch.equal(again[name], value), name
    return first


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(2, 397, 397, 4, 2, 128, "causal", sinks=True), FP16),
        (Case(2, 461, 333, 4, 4, 72, "causal", sinks=True), BF16),
        (Case(2, 397, 397, 4, 4, 64, "causal document", softcap=3.0, sinks=True), FP16),
        (Case(1, 333, 461, 4, 1, 192, "full", sinks=True), BF16),
    ],
    ids=str,
)
def test_sinks_are_as_exact_as_rounding_the_outputs_leaves_them_at_every_call(case, dtype, path):
    inputs = case.inputs(dtype, DEVICE)
    wanted = expected(case, inputs)
    for _ in range(4):  # as it comes, recorded, replayed
        got = ours(case, inputs)
        torch.testing.assert_close(got["lse"].double(), wanted["lse"], atol=1e-4, rtol=0)
        assert_rounded(got, wanted, dtype, ("out", "dq", "dk", "dv", "dlearnable_sink"))


def test_sinks_join_each_row_once_however_many_threads_hold_it(path):
    if path != "portable":
        pytest.skip("a kernel of its own, whatever runs the attention")
    out, lse = torch.ones(4, 4096, 16, 64, device=DEVICE), torch.zeros(4, 16, 4096, device=DEVICE)
    for _ in range(100):
        joined, total = sinks.join(out.clone(), lse.clone(), torch.zeros(16, device=DEVICE))
        assert (joined == 0.5).all()
        torch.testing.assert_close(total, torch.full_like(total, math.log(2)))


REPEATED = [
    Case(2, 1000, 1000, 4, 4, 64, "causal"), Case(2, 1000, 1000, 4, 2, 64, "causal"),
    Case(33, 500, 500, 4, 4, 64, "causal"), Case(2, 1000, 1000, 4, 2, 256, "causal"),
    Case(2, 1000, 1000, 4, 4, 64, "causal document"),
    Case(2, 1000, 1000, 4, 4, 64, "global window"),
    Case(2, 1000, 1000, 4, 4, 64, "shuffled"), Case(2, 1000, 1100, 4, 4, 64, "blocks causal"),
    Case(2, 1000, 1100, 4, 4, 64, "causal", dropout=0.3),
    Case(2, 1000, 1100, 4, 4, 64, "causal", bias=(0, 0, 0, 0)),
    Case(2, 1000, 1100, 4, 4, 64, "causal", bias=(1, 1, 1, 1)),
]  # fmt: skip


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_ten_runs_are_equal_bit_for_bit(case, path):
    inputs = case.inputs(BF16, DEVICE)
    # The portable kernels need no asking.
    the_same_ten_times(inputs, {**case.options(DEVICE), "deterministic": path == "hopper"})


# Where the Hopper kernels add dQ up in one order: every mask that they do so with, grouped heads,
# both warpgroups' ways at D = 128 (a tile late or not), and more items than run at once. At D = 256
# dQ has a kernel of its own.
DETERMINISTIC = [
    Case(2, 1000, 1000, 4, 2, 64, "causal"), Case(2, 700, 1300, 4, 4, 64, "window"),
    Case(1, 1300, 700, 4, 1, 64, "full"), Case(2, 1000, 1000, 4, 4, 128, "causal"),
    Case(2, 700, 1900, 8, 2, 128, "causal"), Case(2, 333, 1461, 4, 2, 128, "full"),
    Case(1, 1301, 777, 4, 4, 128, "full"), Case(2, 1333, 1333, 4, 2, 128, "window causal"),
    Case(2, 1000, 1100, 4, 2, 96, "causal", softcap=3.0),
    Case(2, 3000, 3000, 16, 16, 128, "causal"),
    Case(2, 1000, 1000, 4, 2, 64, "causal", alibi="alibi"),
    Case(2, 700, 1000, 4, 1, 128, "causal", alibi="alibi"),
    Case(2, 1000, 1000, 4, 2, 256, "causal"), Case(1, 777, 1301, 4, 4, 256, "full"),
    Case(1, 1301, 333, 4, 1, 200, "window"), Case(1, 1000, 1100, 4, 2, 256, "causal", softcap=3.0),
    Case(2, 3000, 3000, 16, 16, 256, "window causal"),
]  # fmt: skip


@pytest.mark.parametrize("case", DETERMINISTIC, ids=str)
def test_the_hopper_kernels_add_up_in_one_order_and_are_as_exact_and_the_same_ten_times(case, path):
    if path != "hopper":
        pytest.skip("about the Hopper kernels")
    inputs = case.inputs(BF16, DEVICE)
    options = {**case.options(DEVICE), "deterministic": True}
    line = fk.explain(*inputs[:3], **options)
    assert line.startswith("Hopper kernels")
    assert "backward portable" not in line
    first = the_same_ten_times(inputs, options)
    wanted = expected(case, inputs)
    assert_rounded(first, wanted, BF16, ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("case", REPEATED[:7], ids=str)
def test_two_hundred_runs_give_the_same_bits_but_for_the_hopper_kernels_dq(case, path):
    inputs = case.inputs(BF16, DEVICE)
    first = ours(case, inputs)
    for _ in range(199):
        again = ours(case, inputs)
        for name, value in first.items():
            assert_same(
                again[name], value, added=path == "hopper" and name == "dq" and case.head_dim <= 128
            )


@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_parts_of_the_keys_merged_in_place_are_float64s(head_dim):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, size, 4, head_dim, dtype=BF16, device=DEVICE) for size in (700, 900, 900)
    )
    # Aligned to the last query: the first 250 queries see nothing of the second half.
    halves = (slice(0, 450), (-1, -1)), (slice(450, 900), (-1, 0))
    parts = [
        fk.attention_forward(q, k[:, keys], v[:, keys], window_size=window)
        for keys, window in halves
    ]
    wanted, total = fk.merge_attention([(out.double(), lse.double()) for out, lse in parts])
    out, lse = parts[0][0].float(), parts[0][1]
    rows = slice(100, 700)
    before = out[:, :100].clone()
    fk.merge_attention_into(
        out[:, rows], lse[:, :, rows], parts[1][0][:, rows], parts[1][1][:, :, rows]
    )
    torch.testing.assert_close(out[:, rows].double(), wanted[:, rows], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse[:, :, rows].double(), total[:, :, rows], rtol=1e-6, atol=1e-6)
    assert torch.equal(out[:, :100], before)
