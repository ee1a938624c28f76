from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flashtrain_kernels
from flashtrain.models import Block


@pytest.mark.parametrize(("norm", "activation", "bias"), [("layernorm", "gelu", True), ("rmsnorm", "swiglu", False)])
def test_a_block_adds_two_normalised_branches(norm, activation, bias):
    block = Block(16, 2, ffn=32, norm=norm, activation=activation, bias=bias, attention="sdpa")
    x = torch.randn(2, 5, 16)
    attended = x + block.attention(block.attention_norm(x))
    torch.testing.assert_close(block(x), attended + block.feed_forward(block.feed_forward_norm(attended)))
    assert any("bias" in name for name, _ in block.named_parameters()) == bias


def test_an_encoder_block_sees_both_sides_of_its_document_and_nothing_else(mask_of_lengths):
    torch.manual_seed(0)
    block = Block(16, 2, ffn=32, causal=False, attention="sdpa")
    x = torch.randn(1, 6, 16)
    mask = mask_of_lengths([3, 3], causal=False)
    changed = x.clone()
    changed[:, 2] = -x[:, 2]  # not a shift: the norm would undo that
    before, after = block(x, mask=mask), block(changed, mask=mask)
    assert not torch.allclose(before[:, 0], after[:, 0])
    assert torch.equal(before[:, 3:], after[:, 3:])


def gradients(block, x, mask, run):
    """Of the weights and the input, with the same draws each time."""
    torch.manual_seed(4)
    block.zero_grad()
    x = x.clone().requires_grad_()
    run(block, x, mask).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in block.parameters())]


def plainly(block, x, mask):
    return block(x, mask=mask)


def recomputed(block, x, mask):
    return checkpoint(block, x, mask=mask, use_reentrant=False)


def recomputed_the_old_way(block, x, mask):
    return checkpoint(lambda x: block(x, mask=mask), x, use_reentrant=True)


def recomputed_all_but_attention(block, x, mask):
    kept = lambda: create_selective_checkpoint_contexts(flashtrain_kernels.FORWARDS)  # noqa: E731
    return checkpoint(block, x, mask=mask, use_reentrant=False, context_fn=kept)


@pytest.mark.parametrize("run", [recomputed, recomputed_the_old_way, recomputed_all_but_attention])
@pytest.mark.parametrize("kind", ["flash", "sdpa", "standard"])
@pytest.mark.parametrize(("kv_heads", "packed"), [(2, False), (1, True)])
def test_recomputation_repeats_dropout(run, kind, kv_heads, packed, mask_of_lengths):
    torch.manual_seed(0)
    block = Block(16, 2, kv_heads, ffn=32, dropout=0.3, attention=kind).double()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    mask = mask_of_lengths([3, 4], [7]) if packed else None
    expected = gradients(block, x, mask, plainly)
    torch.testing.assert_close(gradients(block, x, mask, run), expected, atol=1e-12, rtol=0)
