from __future__ import annotations

import pytest
from torch import nn

from flashtrain.errors import UserError
from flashtrain.models.block import normalization


def test_the_names_give_torchs_own_norms():
    assert isinstance(normalization("layernorm", 8, bias=True), nn.LayerNorm)
    assert normalization("layernorm", 8, bias=False).bias is None
    assert isinstance(normalization("rmsnorm", 8, bias=False), nn.RMSNorm)


def test_an_unknown_norm_is_refused():
    with pytest.raises(UserError, match=r"unknown norm 'rsmnorm'. Did you mean 'rmsnorm'"):
        normalization("rsmnorm", 8, bias=False)
