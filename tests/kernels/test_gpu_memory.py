"""On a GPU: nothing is written outside the outputs and nothing inside them is left out; what is
masked contributes nothing, whatever it holds, and what is visible does."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_cases import Case, ours
from gpu_checks import (
    DEVICE,
    NEEDS_GPU,
    assert_same,
    assert_written_within_the_guards,
    guarded_allocations,
)

import flashtrain_kernels as fk

pytestmark = NEEDS_GPU
BF16 = torch.bfloat16
HERE = Path(__file__).parent

GUARDED = [
    Case(2, 333, 461, 4, 2, 64, "causal"), Case(2, 461, 333, 4, 4, 64, "window"),
    Case(1, 1, 461, 4, 4, 64, "causal"),
    Case(1, 301, 259, 3, 3, 40, "causal"), Case(1, 201, 201, 2, 1, 17, "causal"),
    Case(2, 333, 461, 4, 2, 256, "causal"), Case(1, 461, 333, 2, 2, 256),
    Case(1, 461, 333, 2, 2, 128),
    Case(33, 201, 333, 8, 8, 64),  # two whole heads for each of 132 programs
    Case(2, 397, 397, 4, 4, 64, "causal document"), Case(1, 1023, 1023, 1, 1, 64, "global window"),
    Case(2, 397, 397, 4, 4, 64, "shuffled"), Case(2, 333, 461, 4, 4, 64, "blocks causal"),
    Case(2, 333, 461, 4, 4, 64, "causal", dropout=0.3),
    Case(2, 333, 461, 4, 4, 64, "causal", bias=(0, 0, 0, 0)),
    Case(2, 333, 461, 4, 4, 64, "causal", bias=(1, 0, 1, 0)),
    Case(2, 333, 461, 4, 4, 64, "causal", bias=(0, 1, 0, 1)),
    Case(2, 333, 461, 4, 4, 64, "causal", bias=(1, 1, 1, 1)),
]  # fmt: skip


@pytest.mark.parametrize("case", GUARDED, ids=str)
def test_every_output_is_written_wholly_and_nothing_around_it(case, path):
    inputs = case.inputs(BF16, DEVICE)
    wanted = ours(case, inputs)
    with guarded_allocations() as made:
        got = ours(case, inputs)
    # out, lse, dq, dk, dv and the workspace at least; plan tables and dbias too.
    assert len(made) >= 6
    assert_written_within_the_guards(made)
    for name, value in wanted.items():
        assert_same(got[name], value, added=path == "hopper" and name == "dq")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("mask", "batch"),
    [
        ("causal", 1),
        ("causal", 33),
        ("window causal", 1),
        ("blocks causal", 1),
        ("shuffled", 1),
        ("global window", 1),
    ],
)
def test_masked_keys_never_contribute_and_visible_ones_do_even_where_they_are_not_finite(
    mask, batch, head_dim
):
    case = Case(batch, 400, 400, 4, 4, head_dim, mask)
    clean = case.inputs(BF16, DEVICE)
    sees = _rows_that_see(case, clean, 200)
    options, hidden = case.options(DEVICE), ~sees
    for bad in (torch.nan, torch.inf):
        dirty = [x.detach().clone() for x in clean]
        dirty[1][:, 200, :, 3] = bad
        dirty[2][:, 200, :, 5] = bad
        dirty = [x.requires_grad_() for x in dirty]
        out, wanted = fk.flash_attn_func(*dirty, **options), fk.flash_attn_func(*clean, **options)
        torch.testing.assert_close(
            out.transpose(1, 2)[hidden], wanted.transpose(1, 2)[hidden], atol=1e-2, rtol=1e-2
        )
        assert not out.transpose(1, 2)[sees].isfinite().all(-1).any()
        weight = hidden.transpose(1, 2)[..., None].to(BF16)
        got, want = (
            torch.autograd.grad(torch.where(weight > 0, x, 0.0).float().sum(), inputs)[0].transpose(
                1, 2
            )[hidden]
            for x, inputs in ((out, dirty), (wanted, clean))
        )
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


def test_a_visible_key_that_is_not_finite_shows_even_where_dropout_drops_it():
    case = Case(1, 400, 400, 4, 4, 64, "causal", dropout=0.5)
    q, k, v = (x.detach() for x in case.inputs(BF16, DEVICE))
    sees = _rows_that_see(case, (q, k, v), 200)
    v[:, 200, :, 5] = torch.inf
    out = fk.flash_attn_func(q, k, v, **case.options(DEVICE)).transpose(1, 2)
    assert not out[sees][..., 5].isfinite().any()
    assert out[~sees].isfinite().all()


def _rows_that_see(case, inputs, key):
    """(B, H, Sq) bool, by the reference."""
    exact = [x.detach().double() for x in inputs]
    exact[2][:, key] = torch.nan
    return fk.reference.attention(*exact, **case.options(DEVICE)).isnan().any(-1).transpose(1, 2)


def test_keys_that_no_query_sees_get_no_gradient_even_where_they_are_not_finite():
    q = torch.randn(1, 4, 201, 64, device=DEVICE, dtype=BF16, requires_grad=True)
    k, v = (torch.randn(1, 4, 461, 64, device=DEVICE, dtype=BF16) for _ in range(2))
    k[:, :, 205] = torch.nan  # beside the last key that is seen, so in its tile
    v[:, :, 206] = torch.inf
    inputs = (q, k.requires_grad_(), v.requires_grad_())
    out = fk.scaled_dot_product_attention(*inputs, is_causal=True)  # aligned to the top left
    dq, dk, dv = torch.autograd.grad(out.float().sum(), inputs)
    assert dq.isfinite().all()
    for gradient in (dk, dv):
        assert gradient[:, :, :201].isfinite().all()
        assert gradient[:, :, 201:].eq(0).all()


def test_a_bias_of_minus_infinity_hides_whole_rows_and_all_that_is_in_its_keys():
    case = Case(2, 333, 461, 4, 4, 64, "causal", bias=(0, 0, 0, 0))
    inputs = case.inputs(BF16, DEVICE)
    with torch.no_grad():
        inputs[3][:, :, 4] = -torch.inf
        inputs[3][:, :, :, 200] = -torch.inf
        inputs[1][:, 200] = torch.nan
        inputs[2][:, 200] = torch.inf
    got = ours(case, inputs)
    assert got["out"][:, 4].eq(0).all()
    assert got["lse"][:, :, 4].eq(-torch.inf).all()
    assert got["dq"][:, 4].eq(0).all()
    assert got["dbias"][:, :, 4].eq(0).all()
    assert got["dbias"][..., 200].eq(0).all()
    assert got["dk"][:, 200].eq(0).all()
    for name, value in got.items():
        assert (
            value[got["lse"].isfinite()].isfinite().all()
            if name == "lse"
            else value.isfinite().all()
        ), name


# It compiles 60 to 80 kernels: minutes where Triton's cache is empty, as it may be since
# these tests come first.
@pytest.mark.longest
@pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on PATH"
)
def test_compute_sanitizer_finds_no_access_outside_of_memory(path):
    places = os.pathsep.join(
        [str(HERE), str(HERE.parents[1] / "kernels"), os.environ.get("PYTHONPATH", "")]
    )
    result = subprocess.run(
        ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "7", sys.executable,
         str(HERE / "sanitizer_cases.py"), "cuda", path],
        env={**os.environ, "PYTHONPATH": places}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in result.stdout
