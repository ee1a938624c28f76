"""flash-attn's published behaviour on a GPU: windows, packed sequences, return values."""

import pytest
import torch
from gpu_checks import DEVICE, NEEDS_GPU, even_weights
from plain_formula import cumulative, each_alone, window_pairs

import flashtrain_kernels as fk

pytestmark = NEEDS_GPU
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "window", [(0, 0), (1, 0), (2, 1), (-1, 1), (3, -1), (70, 200), (1000, 1000)], ids=str
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(7, 7), (5, 9), (9, 5), (300, 411)])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_include_both_ends_and_are_aligned_to_the_bottom_right(
    causal, seqlen_q, seqlen_k, window
):
    seen = even_weights(1, seqlen_q, seqlen_k, 2, causal=causal, window_size=window)[0, 0] > 0
    assert torch.equal(seen.cpu(), window_pairs(seqlen_q, seqlen_k, *window, causal))


@pytest.mark.parametrize(
    ("causal", "window"), [(True, (-1, -1)), (False, (-1, -1)), (False, (40, 20))]
)
def test_packed_sequences_equal_the_same_sequences_one_by_one(causal, window):
    cu_q, cu_k = (
        cumulative([130, 0, 300, 1, 120, 65, 64], DEVICE),
        cumulative([260, 40, 300, 170, 50, 0, 64], DEVICE),
    )
    inputs = [
        torch.randn(int(cu[-1]), heads, 64, device=DEVICE, dtype=BF16, requires_grad=True)
        for cu, heads in ((cu_q, 4), (cu_k, 2), (cu_k, 2))
    ]
    options = {"causal": causal, "window_size": window}
    out, lse, probabilities = fk.flash_attn_varlen_func(
        *inputs, cu_q, cu_k, 300, 300, return_attn_probs=True, **options
    )
    assert probabilities.shape == (0,)
    wanted, wanted_lse = each_alone(fk.flash_attn_func, *inputs, cu_q, cu_k, **options)
    torch.testing.assert_close(out, wanted, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-4, rtol=0)
    weight = torch.randn_like(out)
    got, gradients = (
        torch.autograd.grad((x * weight).float().sum(), inputs) for x in (out, wanted)
    )
    torch.testing.assert_close(got, gradients, atol=4e-2, rtol=2e-2)
