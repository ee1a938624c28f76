"""The attention module on its own, as another program would use it."""

from __future__ import annotations

import pytest
import torch

from flashtrain.errors import UserError
from flashtrain.models import Attention, RotaryPositions
from flashtrain.models.key_value_cache import LayerCache

KINDS = ["flash", "sdpa", "standard"]


# float64 shows that two ways are the same to the last digit.
def build(attention: str = "sdpa", kv_heads: int = 4, rotary: bool = False, **options) -> Attention:
    torch.manual_seed(0)
    turned = RotaryPositions(8) if rotary else None
    return Attention(32, 4, kv_heads, attention=attention, rotary=turned, **options).double()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_reading_documents_in_pieces_with_a_cache_gives_the_same_as_reading_at_once(
    x, kind, mask_of_lengths
):
    module = build(kind, kv_heads=2)
    mask, index = mask_of_lengths([4, 5], [2, 7]), torch.arange(9)
    cache = LayerCache(context=9)
    with torch.no_grad():
        pieces = [
            module(x[:, begin:end], mask=mask.select(index[begin:end], index[:end]), cache=cache)
            for begin, end in ((0, 3), (3, 4), (4, 9))
        ]
        torch.testing.assert_close(
            torch.cat(pieces, dim=1), module(x, mask=mask), atol=1e-12, rtol=0
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rotary", [False, True])
def test_dropout_acts_in_training_only(x, kind, rotary):
    module = build(kind, rotary=rotary, dropout=0.5)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    torch.testing.assert_close(module(x), build(kind, rotary=rotary)(x), atol=1e-12, rtol=0)


class Unturned(torch.nn.Module):
    """A rotary that turns nothing: q, k and v go their separate way, unchanged."""

    def forward(self, qk, positions):
        return qk


@pytest.mark.parametrize("packed", [False, True])
def test_flash_drops_the_same_weights_whether_q_k_and_v_lie_together_or_apart(
    x, packed, mask_of_lengths
):
    module = build("flash", dropout=0.5)
    mask = mask_of_lengths([4, 5], [9]) if packed else None
    results = []
    for rotary in (None, Unturned()):
        module.rotary = rotary
        torch.manual_seed(2)
        results.append(module(x, mask=mask))
    torch.testing.assert_close(*results, atol=1e-12, rtol=0)


def test_a_full_cache_refuses_more():
    cache = LayerCache(context=2)
    with pytest.raises(UserError, match=r"3 tokens for a cache of 2"):
        cache.append(torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1, 4))
