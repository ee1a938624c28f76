"""Masks, block masks and biases through the public functions, and rows that see nothing."""

import pytest
import torch
from plain_formula import assert_same, plain_attention, tensors, window_pairs

import flashtrain_kernels as fk
from flashtrain_kernels import masks


def test_a_mask_that_the_batch_shares_keeps_rows_apart_in_dropout_and_slopes():
    q, k, v = tensors(seqlen_q=9)
    slopes = torch.rand(2, 4)
    by_mask = fk.flash_attn_func(
        q, k, v, 0.5, alibi_slopes=slopes, mask=masks.causal(9), dropout_seed=3
    )
    by_name = fk.flash_attn_func(q, k, v, 0.5, alibi_slopes=slopes, causal=True, dropout_seed=3)
    torch.testing.assert_close(by_mask, by_name)


@pytest.mark.parametrize(
    "shape", [(9,), (6, 1), (1, 9), (4, 6, 9), (2, 1, 1, 9), (1, 1, 6, 9), (2, 4, 6, 9)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_bias_broadcasts_and_its_gradient_has_its_shape(shape, dtype):
    inputs = tensors()
    bias = torch.randn(shape, dtype=dtype, requires_grad=True)
    wanted = torch.autograd.grad(
        plain_attention(*inputs, bias=bias)[0].square().sum(), (*inputs, bias)
    )
    for with_lse in (True, False):
        out = fk.flash_attn_func(*inputs, bias=bias, return_lse=with_lse)
        got = torch.autograd.grad((out[0] if with_lse else out).square().sum(), (*inputs, bias))
        for one, other in zip(got, wanted, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("with_lse", [True, False], ids=["reference", "torch"])
@pytest.mark.parametrize("how", ["causal", "mask", "bias"])
def test_rows_that_see_nothing_give_zero_and_no_gradient(how, with_lse):
    inputs = tensors(2, 5, 2)
    bias = torch.zeros(5, 2, dtype=torch.float64)
    bias[:3] = -torch.inf
    options = {
        "causal": {"causal": True},
        "mask": {"mask": masks.causal(5, 2)},
        "bias": {"bias": bias},
    }[how]
    out = fk.flash_attn_func(*inputs, **options, return_lse=with_lse)
    if with_lse:
        out, lse = out
        assert lse[:, :, :3].eq(-torch.inf).all()
        assert lse[:, :, 3:].isfinite().all()
    assert out[:, :3].eq(0).all()
    dq, dk, dv = torch.autograd.grad(out.square().sum(), inputs)
    assert dq[:, :3].eq(0).all()
    assert all(x.isfinite().all() and x.ne(0).any() for x in (dq, dk, dv))


@pytest.mark.parametrize("with_lse", [True, False], ids=["reference", "torch"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_block_mask_hides_whole_blocks_per_head(with_lse, causal):
    inputs = tensors(seqlen_q=40, seqlen_k=50)
    blocks = torch.rand(4, 3, 4, generator=torch.Generator().manual_seed(0)) > 0.4
    mask = fk.block_mask(blocks, block_size=16, seqlen_q=40, seqlen_k=50, causal=causal)
    seen = blocks.repeat_interleave(16, 1)[:, :40].repeat_interleave(16, 2)[:, :, :50]
    seen = seen & window_pairs(40, 50, causal=causal)
    got = fk.flash_attn_func(*inputs, causal=causal, mask=mask, return_lse=with_lse)
    wanted = plain_attention(*inputs, seen=seen)
    assert_same(got if with_lse else (got,), wanted if with_lse else wanted[:1], inputs)
