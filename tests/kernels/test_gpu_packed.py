"""Packed sequences on a GPU, found in cu_seqlens by the kernels or by a mask made of them:
outputs and gradients are as exact either way, whatever the lengths are, and nothing of a
sequence is in another.

T tokens of a side, H query heads, K key/value heads, D head dimension.
"""

import pytest
import torch
from gpu_checks import (
    DEVICE,
    NEEDS_GPU,
    assert_written_within_the_guards,
    captured,
    error,
    guarded_allocations,
)

import flashtrain_kernels as fk
from flashtrain_kernels import masks, reference
from flashtrain_kernels.backends.hopper import backend as hopper
from flashtrain_kernels.eager import attention
from flashtrain_kernels.forms import BATCH

pytestmark = NEEDS_GPU
BF16, FP16 = torch.bfloat16, torch.float16
# (queries, keys) of each sequence; tokens of either side past the last one.
PACKINGS = {
    "equal": ([(n, n) for n in (130, 1, 64, 0, 301, 193, 128, 7)], (5, 5)),
    "unequal": ([(130, 260), (0, 40), (300, 303), (1, 170), (120, 50), (65, 0), (64, 64)], (0, 0)),
    "tails": ([(63, 65), (129, 127)], (200, 3)),
    "one": ([(517, 517)], (0, 0)),
    "one shorter than its row": ([(100, 90)], (333, 70)),
    "nothing": ([(0, 0), (0, 0)], (70, 130)),
    "tiny": ([(i % 6, (i * 7) % 5) for i in range(400)], (1, 2)),
    "long": ([(1301, 1301), (704, 904)], (9, 0)),  # of the tiles for long sequences
    # Several tiles for each program.
    "documents": (
        [(n, n) for n in (3001, 0, 1, 700, 1999, 130, 0, 5003)] + [(900, 1500), (1400, 800)],
        (300, 7),
    ),
}
WINDOWS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 0)},
    "both sides": {"window_size": (30, 20)},
}


def packed(name, head_dim=64, heads=(4, 2), dtype=BF16):
    """(q, k, v), (cu_q, cu_k), fresh random numbers."""
    pairs, tails = PACKINGS[name]
    cu = [
        torch.tensor([0, *[pair[side] for pair in pairs]]).cumsum(0).int().to(DEVICE)
        for side in (0, 1)
    ]
    totals = [int(cu[side][-1]) + tails[side] for side in (0, 1)]
    shapes = ((totals[0], heads[0]), (totals[1], heads[1]), (totals[1], heads[1]))
    tensors = [
        torch.randn(*shape, head_dim, device=DEVICE, dtype=dtype, requires_grad=True)
        for shape in shapes
    ]
    return tensors, cu


def gradients(out, lse, inputs, dout, dlse):
    loss = (out.to(dlse.dtype) * dout.to(dlse.dtype)).sum() + torch.where(
        lse.isfinite(), lse * dlse, 0.0
    ).sum()
    found = torch.autograd.grad(loss, inputs)
    return dict(
        zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *found), strict=True)
    )


def results(inputs, cu, dout, dlse, **options):
    longest = max(x.shape[0] for x in inputs)
    out, lse = fk.flash_attn_varlen_func(*inputs, *cu, longest, longest, return_lse=True, **options)
    return gradients(out, lse, inputs, dout, dlse)


def by_masks(monkeypatch):
    """As if the kernels could not find sequences themselves."""
    monkeypatch.setattr(hopper, "finds_sequences", lambda *call: False)


def expected(inputs, cu, dout, dlse, causal=False, window_size=(-1, -1)):
    """The reference in float64."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    q, k, v = exact
    mask = masks.varlen(*cu, q.shape[0], k.shape[0], causal=causal, window=window_size)
    out, lse = reference.attention(q[None], k[None], v[None], mask=mask, return_lse=True)
    return gradients(out[0], lse[0], exact, dout, dlse.double())


CASES = [
    ("equal", "causal", 64, (4, 4), BF16), ("equal", "causal", 128, (4, 2), BF16),
    ("equal", "full", 64, (4, 2), FP16),
    ("equal", "window", 128, (4, 4), BF16), ("unequal", "causal", 64, (4, 1), BF16),
    ("unequal", "causal", 128, (4, 4), FP16), ("unequal", "full", 128, (4, 2), BF16),
    ("unequal", "both sides", 64, (4, 4), BF16), ("unequal", "both sides", 128, (4, 4), BF16),
    ("tails", "causal", 64, (4, 4), BF16), ("tails", "full", 128, (4, 4), BF16),
    ("tails", "window", 64, (4, 4), FP16),
    ("one", "causal", 128, (4, 4), BF16), ("one", "full", 64, (4, 4), BF16),
    ("one shorter than its row", "causal", 64, (4, 4), BF16),
    ("one shorter than its row", "full", 128, (4, 4), BF16),
    ("nothing", "causal", 64, (4, 4), BF16), ("nothing", "full", 128, (4, 2), BF16),
    ("tiny", "causal", 64, (4, 4), BF16), ("tiny", "full", 128, (4, 2), BF16),
    ("tiny", "window", 128, (4, 4), BF16),
    ("long", "causal", 64, (4, 2), BF16), ("long", "causal", 128, (4, 4), BF16),
    ("long", "full", 64, (4, 4), FP16),
    ("long", "full", 128, (4, 2), FP16), ("long", "window", 64, (4, 4), BF16),
    ("long", "window", 128, (4, 2), BF16),
    ("long", "both sides", 64, (4, 4), BF16), ("long", "both sides", 128, (4, 4), BF16),
    ("documents", "causal", 64, (2, 2), BF16), ("documents", "causal", 128, (2, 1), BF16),
    ("equal", "causal", 96, (4, 4), BF16), ("equal", "causal", 256, (4, 4), BF16),
    ("unequal", "full", 256, (4, 2), FP16), ("unequal", "both sides", 256, (4, 4), BF16),
    ("tails", "window", 200, (4, 1), BF16), ("nothing", "causal", 256, (4, 2), BF16),
    ("tiny", "window", 256, (4, 2), BF16), ("long", "full", 136, (4, 4), BF16),
    ("documents", "causal", 256, (2, 1), BF16),
]  # fmt: skip


@pytest.mark.parametrize(("name", "window", "head_dim", "heads", "dtype"), CASES, ids=str)
def test_they_are_as_exact_by_boundaries_as_by_a_mask(
    name, window, head_dim, heads, dtype, path, monkeypatch
):
    if path == "portable":
        pytest.skip("the portable kernels know sequences by masks alone")
    inputs, cu = packed(name, head_dim, heads, dtype)
    dout, dlse = (
        torch.randn_like(inputs[0]),
        torch.randn(heads[0], inputs[0].shape[0], device=DEVICE),
    )
    wanted = expected(inputs, cu, dout, dlse, **WINDOWS[window])
    got = results(inputs, cu, dout, dlse, **WINDOWS[window])
    by_masks(monkeypatch)
    theirs = results(inputs, cu, dout, dlse, **WINDOWS[window])
    torch.testing.assert_close(got["lse"].double(), wanted["lse"], atol=1e-4, rtol=0)
    for what in ("out", "dq", "dk", "dv"):
        most = wanted[what].abs().max().item()
        bound = 2 * error(theirs, wanted, what) + torch.finfo(dtype).eps * max(most, 0.01)
        assert error(got, wanted, what) <= bound, what


def test_no_mask_is_made_where_the_kernels_find_sequences(monkeypatch):
    inputs, cu = packed("equal")
    made = []
    of_mask = masks.Sequences.mask
    monkeypatch.setattr(masks.Sequences, "mask", lambda self: made.append(1) or of_mask(self))
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(4, inputs[0].shape[0], device=DEVICE)
    results(inputs, cu, dout, dlse, causal=True)
    found = hopper.unavailable(inputs[0].device) is None
    assert bool(made) != found
    planned = masks.varlen(*cu, *(x.shape[0] for x in inputs[:2]), causal=True).planned(64, BF16)
    assert (planned.plan is None) == found
    made.clear()
    results(inputs, cu, dout, dlse, mask=planned)
    assert not made


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["unequal", "long", "documents"])
def test_what_a_neighbour_or_the_tail_holds_is_not_seen(name, head_dim, window):
    for bad in (torch.nan, torch.inf):
        _is_not_seen(name, head_dim, window, bad)


def _is_not_seen(name, head_dim, window, bad):
    inputs, cu = packed(name, head_dim)
    (cu_q, cu_k), options = [x.tolist() for x in cu], WINDOWS[window]
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(4, inputs[0].shape[0], device=DEVICE)
    clean = results(inputs, cu, dout, dlse, **options)
    # Its neighbours' tiles reach into it, or its row's tail into theirs.
    sick = {"unequal": 2, "long": 1, "documents": 4}[name]
    rows_q, rows_k = ([*range(ends[sick], ends[sick + 1]), *range(ends[-1], total)] for ends,
        total in (
        (cu_q, inputs[0].shape[0]), (cu_k, inputs[1].shape[0])))  # fmt: skip
    with torch.no_grad():
        inputs[0][rows_q[::3]] = bad
        dout[rows_q[::2]] = bad
        inputs[1][rows_k[::3]] = bad
        inputs[2][rows_k[::2]] = bad
    got = results(inputs, cu, dout, dlse, **options)
    for what, value in got.items():
        rows = rows_q if what in ("out", "lse", "dq") else rows_k
        well = torch.ones(value.shape[1 if what == "lse" else 0], dtype=torch.bool, device=DEVICE)
        well[rows] = False
        one, other = (x[:, well] if what == "lse" else x[well] for x in (value, clean[what]))
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2, msg=what)
    assert got["out"][cu_q[sick] : cu_q[sick + 1]].isnan().any()
    assert got["out"][cu_q[-1] :].eq(0).all()
    assert got["lse"][:, cu_q[-1] :].eq(-torch.inf).all()
    assert got["dq"][cu_q[-1] :].eq(0).all()
    assert got["dk"][cu_k[-1] :].eq(0).all()
    assert got["dv"][cu_k[-1] :].eq(0).all()


@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_row_is_written_and_nothing_around_the_outputs(name, head_dim):
    inputs, cu = packed(name, head_dim)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(4, inputs[0].shape[0], device=DEVICE)
    with guarded_allocations() as made:
        results(inputs, cu, dout, dlse, causal=True)
    assert_written_within_the_guards(made)


def test_packed_projections_and_strides():
    qkv = torch.randn(905, 3, 4, 64, device=DEVICE, dtype=BF16, requires_grad=True)
    cu = torch.tensor([0, 130, 131, 500, 900], device=DEVICE, dtype=torch.int32)
    out = fk.flash_attn_varlen_qkvpacked_func(qkv, cu, 400, causal=True)
    apart = [x.detach().clone().requires_grad_() for x in qkv.unbind(1)]
    wanted = fk.flash_attn_varlen_func(*apart, cu, cu, 400, 400, causal=True)
    assert torch.equal(out, wanted)
    weight = torch.randn_like(out)
    (got,) = torch.autograd.grad(out, qkv, weight)
    for one, other in zip(got.unbind(1), torch.autograd.grad(wanted, apart, weight), strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def test_thousands_of_sequences_in_a_long_row(monkeypatch):
    lengths = torch.randint(0, 14, (5000,))
    cu = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int().to(DEVICE)
    total = int(cu[-1]) + 3
    inputs = [
        torch.randn(total, 2, 64, device=DEVICE, dtype=BF16, requires_grad=True) for _ in range(3)
    ]
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(2, total, device=DEVICE)
    got = results(inputs, (cu, cu), dout, dlse, causal=True)
    by_masks(monkeypatch)
    wanted = results(inputs, (cu, cu), dout, dlse, causal=True)
    for what, value in wanted.items():
        torch.testing.assert_close(got[what], value, atol=2e-2, rtol=2e-2)


def test_torch_compile_and_a_cuda_graph_take_other_boundaries():
    inputs, _ = packed("one")
    cu = torch.tensor([0, 100, 100, 517], device=DEVICE, dtype=torch.int32)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(4, 517, device=DEVICE)

    def step():
        return list(results(inputs, (cu, cu), dout, dlse, causal=True).values())

    compiled = torch.compile(
        lambda q, k, v, cu: fk.flash_attn_varlen_func(q, k, v, cu, cu, 517, 517, causal=True)
    )
    graph, outputs = captured(step)
    for ends in ([0, 100, 100, 517], [0, 3, 259, 500], [0, 0, 0, 0]):
        cu.copy_(torch.tensor(ends))
        graph.replay()
        for got, wanted in zip(outputs, step(), strict=True):
            torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)
        assert torch.equal(compiled(*inputs, cu), step()[0])


@pytest.mark.parametrize(
    "ends", [[0, 2000, 400], [7, 100, 400], [0, -5, 400], [0, 300, 200]], ids=str
)
def test_boundaries_that_cannot_be_write_nowhere_else(ends):
    """Such as torch.compile and CUDA graphs do not look at."""
    cu = torch.tensor(ends, device=DEVICE, dtype=torch.int32)
    q, k, v = (
        torch.randn(1, 400, 2, 64, device=DEVICE, dtype=BF16, requires_grad=True) for _ in range(3)
    )
    options = fk.options.Options(0.125).by_boundaries(masks.Sequences(cu, cu, 400, 400, (-1, 0)))
    with guarded_allocations() as made:
        out, _ = attention(fk.ops.FORWARD_IN[BATCH], (q, k, v), options)
        torch.autograd.grad(out.float().sum(), (q, k, v))
    torch.cuda.synchronize()
    for buffer, inside, _ in made:
        assert buffer[:4096].eq(77).all()
        assert buffer[4096 + inside.numel() :].eq(77).all()


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_gradients_are_the_same_ten_times(head_dim, window, path):
    inputs, cu = packed("unequal", head_dim)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(4, inputs[0].shape[0], device=DEVICE)
    wanted = results(inputs, cu, dout, dlse, **WINDOWS[window])
    first = results(inputs, cu, dout, dlse, deterministic=True, **WINDOWS[window])
    for what, value in wanted.items():
        torch.testing.assert_close(first[what], value, atol=2e-2, rtol=2e-2)
    for _ in range(9):
        again = results(inputs, cu, dout, dlse, deterministic=True, **WINDOWS[window])
        assert all(torch.equal(again[what], value) for what, value in first.items())
