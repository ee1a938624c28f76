"""The two passes apart: over all keys they are flash_attn_func; over parts of the keys
their gradients add up."""

import pytest
import torch
from plain_formula import tensors as random_tensors

from flashtrain_kernels import (
    attention_backward,
    attention_forward,
    flash_attn_func,
    masks,
    merge_attention,
)


def tensors():
    q, k, v = (x.detach() for x in random_tensors(seqlen_q=13, seqlen_k=21, head_dim=8))
    return q, k, v, torch.randn_like(q)


def exact(q, k, v, dout, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves, **options)
    return out, torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize(("dropout", "softcap"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.7)])
def test_over_all_keys_they_are_the_differentiable_function(dropout, softcap):
    q, k, v, dout = tensors()
    mask = masks.causal(13, 21)
    options = {"mask": mask, "dropout_p": dropout, "dropout_seed": 5, "softcap": softcap}
    expected, gradients = exact(q, k, v, dout, **options)
    out, lse = attention_forward(q, k, v, **options)
    torch.testing.assert_close(out, expected, atol=1e-13, rtol=0)
    for ours, theirs in zip(
        attention_backward(dout, q, k, v, out, lse, **options), gradients, strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=0)


@pytest.mark.parametrize(("dropout", "softcap"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.7)])
def test_the_gradients_of_parts_of_the_keys_add_up(dropout, softcap):
    q, k, v, dout = tensors()
    # The window makes some queries see nothing of a part.
    whole = masks.sliding_window(21, (4, 2)).select(torch.arange(4, 17), torch.arange(21))
    shared = {"dropout_p": dropout, "dropout_seed": 5, "softcap": softcap}
    expected, gradients = exact(q, k, v, dout, mask=whole, **shared)
    parts = [torch.tensor([0, 2, 4, 20]), torch.tensor([3, 1, 5, 6, 7, 8, 9]), torch.arange(10, 20)]
    options = [{"mask": whole.select(torch.arange(13), part), **shared} for part in parts]
    out, lse = merge_attention(
        [
            attention_forward(q, k[:, part], v[:, part], **each)
            for part, each in zip(parts, options, strict=True)
        ]
    )
    torch.testing.assert_close(out, expected, atol=1e-13, rtol=0)
    total = torch.zeros_like(q)
    for part, each in zip(parts, options, strict=True):
        dq, dk, dv = attention_backward(dout, q, k[:, part], v[:, part], out, lse, **each)
        total += dq
        torch.testing.assert_close(dk, gradients[1][:, part], atol=1e-13, rtol=0)
        torch.testing.assert_close(dv, gradients[2][:, part], atol=1e-13, rtol=0)
    torch.testing.assert_close(total, gradients[0], atol=1e-13, rtol=0)


def test_mistakes_name_the_argument():
    q, k, v, dout = tensors()
    out, lse = attention_forward(q, k, v)
    with pytest.raises(ValueError, match=r"lse must have the shape \(2, 4, 13\)"):
        attention_backward(dout, q, k, v, out, lse.transpose(1, 2))
    with pytest.raises(ValueError, match="dropout_seed must be the forward's own"):
        attention_backward(dout, q, k, v, out, lse, dropout_p=0.1)
    with pytest.raises(ValueError, match="k and v must have the same shape"):
        attention_forward(q, k, v[:, 1:])
