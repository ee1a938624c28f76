"""The kernel of linear_cross_entropy in Triton's interpreter: run by test_loss_head.py in a process of its own."""

import pytest
import torch
import torch.nn.functional as F

from flashtrain_kernels import linear_cross_entropy


@pytest.mark.parametrize(("tokens", "rows", "vocab_size", "chunk"), [(7, 50, 47, 3), (3, 9000, 8999, None)])
def test_the_kernel_is_torchs_cross_entropy(tokens, rows, vocab_size, chunk):
    hidden, weight = torch.randn(tokens, 16, requires_grad=True), torch.randn(rows, 16, requires_grad=True)
    labels = torch.randint(vocab_size, (tokens,))
    labels[0] = -100
    ours = linear_cross_entropy(hidden, weight, labels, vocab_size=vocab_size, chunk=chunk)
    theirs = F.cross_entropy(F.linear(hidden, weight[:vocab_size]), labels)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(theirs, (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(ours, (hidden, weight)), wanted, rtol=1e-4, atol=1e-5)
