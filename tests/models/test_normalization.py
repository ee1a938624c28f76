from __future__ import annotations

from torch import nn

from flashtrain.models.block import normalization


def test_the_names_give_torchs_own_norms():
    assert isinstance(normalization("layernorm", 8, bias=True), nn.LayerNorm)
    assert normalization("layernorm", 8, bias=False).bias is None
    assert isinstance(normalization("rmsnorm", 8, bias=False), nn.RMSNorm)
