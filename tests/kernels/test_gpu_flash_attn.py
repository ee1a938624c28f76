"""flash-attn's published behaviour on a GPU: windows, packed sequences, return values."""

import pytest
import torch
from gpu_checks import DEVICE, NEEDS_GPU, even_weights

import flashtrain_kernels as fk

pytestmark = NEEDS_GPU
BF16 = torch.bfloat16


def visible(seqlen_q, seqlen_k, **options):
    """Which query sees which key, as the kernels compute it."""
    return (even_weights(1, seqlen_q, seqlen_k, 2, **options)[0, 0] > 0).int().tolist()


@pytest.mark.parametrize("window", [(0, 0), (1, 0), (2, 1), (-1, 1), (3, -1), (70, 200), (1000, 1000)], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(7, 7), (5, 9), (9, 5), (300, 411)])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_include_both_ends_and_are_aligned_to_the_bottom_right(causal, seqlen_q, seqlen_k, window):
    left, right = (seqlen_q + seqlen_k if side < 0 else side for side in window)
    distance = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    wanted = (distance >= -left) & (distance <= (0 if causal else right))
    assert visible(seqlen_q, seqlen_k, causal=causal, window_size=window) == wanted.int().tolist()


@pytest.mark.parametrize(("causal", "window"), [(True, (-1, -1)), (False, (-1, -1)), (False, (40, 20))])
def test_packed_sequences_equal_the_same_sequences_one_by_one(causal, window):
    lengths = [(130, 260), (0, 40), (300, 300), (1, 170), (120, 50), (65, 0), (64, 64)]
    cu_q, cu_k = (
        torch.tensor([0, *[pair[side] for pair in lengths]], device=DEVICE).cumsum(0).int() for side in (0, 1)
    )  # fmt: skip
    q = torch.randn(int(cu_q[-1]), 4, 64, device=DEVICE, dtype=BF16, requires_grad=True)
    k, v = (torch.randn(int(cu_k[-1]), 2, 64, device=DEVICE, dtype=BF16, requires_grad=True) for _ in range(2))
    out, lse, probabilities = fk.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 300, 300, causal=causal, window_size=window, return_attn_probs=True
    )
    assert probabilities.shape == (0,)
    outs, lses = [], []
    for number in range(len(lengths)):
        queries, keys = (slice(int(cu[number]), int(cu[number + 1])) for cu in (cu_q, cu_k))
        one, one_lse = fk.flash_attn_func(
            q[None, queries], k[None, keys], v[None, keys], causal=causal, window_size=window, return_lse=True
        )
        outs.append(one[0])
        lses.append(one_lse[0])
    torch.testing.assert_close(out, torch.cat(outs), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, torch.cat(lses, 1), atol=1e-4, rtol=0)
    weight = torch.randn_like(out)
    got = torch.autograd.grad((out * weight).float().sum(), (q, k, v))
    wanted = torch.autograd.grad((torch.cat(outs) * weight).float().sum(), (q, k, v))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=4e-2, rtol=2e-2)
