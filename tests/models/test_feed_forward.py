from __future__ import annotations

import torch
import torch.nn.functional as F

from flashtrain.models.block import feed_forward


def test_gelu_is_the_tanh_form():
    layer = feed_forward("gelu", 8, 32, bias=True)
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(layer(x), layer.down(F.gelu(layer.up(x), approximate="tanh")))


def test_swiglu_gates_one_half_by_the_silu_of_the_other():
    layer = feed_forward("swiglu", 8, 24, bias=False)
    x = torch.randn(2, 3, 8)
    gate, value = x @ layer.up.weight[:24].t(), x @ layer.up.weight[24:].t()
    torch.testing.assert_close(layer(x), (gate * torch.sigmoid(gate) * value) @ layer.down.weight.t())
