from __future__ import annotations

import pytest
import torch

from flashtrain.models import Block
from flashtrain.models.layer_spec import layers_alike


@pytest.mark.parametrize(
    ("norm", "activation", "bias"), [("layernorm", "gelu", True), ("rmsnorm", "swiglu", False)]
)
def test_a_block_adds_two_normalised_branches(norm, activation, bias):
    block = Block(
        16, *layers_alike(1, 16, 2, 2, 32, activation), norm=norm, bias=bias, attention="sdpa"
    )
    x = torch.randn(2, 5, 16)
    attended = x + block.attention(block.attention_norm(x))
    torch.testing.assert_close(
        block(x), attended + block.feed_forward(block.feed_forward_norm(attended))
    )
    assert any("bias" in name for name, _ in block.named_parameters()) == bias


def test_an_encoder_block_sees_both_sides_of_its_document_and_nothing_else(mask_of_lengths):
    torch.manual_seed(0)
    block = Block(16, *layers_alike(1, 16, 2, 2, 32), causal=False, attention="sdpa")
    x = torch.randn(1, 6, 16)
    mask = mask_of_lengths([3, 3], causal=False)
    changed = x.clone()
    changed[:, 2] = -x[:, 2]  # not a shift: the norm would undo that
    before, after = block(x, mask=mask), block(changed, mask=mask)
    assert not torch.allclose(before[:, 0], after[:, 0])
    assert torch.equal(before[:, 3:], after[:, 3:])
