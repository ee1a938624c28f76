"""The attention module on its own, as another program would use it."""

from __future__ import annotations

import pytest
import torch

from flashtrain.errors import UserError
from flashtrain.models import Attention, RotaryPositions
from flashtrain.models.cache import LayerCache

KINDS = ["flash", "sdpa", "standard"]
# float64 shows that two ways are the same to the last digit; flash computes in float32 at most.
DTYPES = {"flash": torch.float32, "sdpa": torch.float64, "standard": torch.float64}
TOLERANCES = {"flash": 1e-5, "sdpa": 1e-12, "standard": 1e-12}


def build(attention: str = "sdpa", kv_heads: int = 4, rotary: bool = False, **options) -> Attention:
    torch.manual_seed(0)
    turned = RotaryPositions(8) if rotary else None
    return Attention(32, 4, kv_heads, attention=attention, rotary=turned, **options).to(DTYPES[attention])


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("packed", [False, True])
def test_outputs_and_gradients_are_the_same_whichever_attention_computes_them(
    x, rotary, kv_heads, packed, documents_of_lengths
):
    documents = documents_of_lengths([4, 5], [9]) if packed else None
    results = {}
    for kind in KINDS:
        module = build(kind, kv_heads, rotary)
        out = module(x.to(DTYPES[kind]), documents=documents)
        results[kind] = [out, *torch.autograd.grad(out.square().mean(), list(module.parameters()))]
    for kind, tolerance in (("sdpa", 1e-10), ("flash", 1e-5)):
        for ours, exact in zip(results[kind], results["standard"], strict=True):
            torch.testing.assert_close(ours.double(), exact, atol=tolerance, rtol=0)


def test_it_equals_torchs_multi_head_attention(x):
    module = build("sdpa")
    theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True).double()
    theirs.load_state_dict(
        {
            "in_proj_weight": module.qkv.weight,
            "in_proj_bias": module.qkv.bias,
            "out_proj.weight": module.output.weight,
            "out_proj.bias": module.output.bias,
        }
    )
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    expected, _ = theirs(x, x, x, attn_mask=hidden, need_weights=False)
    torch.testing.assert_close(module(x), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_causal_attention_does_not_see_the_future(x, kind):
    module = build(kind)
    x = x.to(DTYPES[kind])
    changed = x.clone()
    changed[:, 5:] += 1
    assert torch.equal(module(x)[:, :5], module(changed)[:, :5])


@pytest.mark.parametrize("kind", KINDS)
def test_attention_that_is_not_causal_sees_everything(x, kind):
    module = build(kind, causal=False)
    x = x.to(DTYPES[kind])
    changed = x.clone()
    changed[:, 8] += 1
    assert (module(x)[:, 0] - module(changed)[:, 0]).abs().max() > 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rotary", [False, True])
def test_reading_in_pieces_with_a_cache_gives_the_same_as_reading_at_once(x, kind, rotary):
    module = build(kind, kv_heads=2, rotary=rotary)
    cache = LayerCache(context=9)
    x = x.to(DTYPES[kind])
    with torch.no_grad():
        pieces = [module(piece, cache=cache) for piece in x.split([4, 1, 3, 1], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), module(x), atol=TOLERANCES[kind], rtol=0)


def test_dropout_acts_in_training_only(x):
    module = build("sdpa", dropout=0.5)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


def test_the_packed_path_hands_the_projection_over_without_a_copy(x, monkeypatch):
    module = build("flash")
    x = x.float()
    seen = {}

    def look(qkv, **options):
        seen["shares_memory"] = qkv.is_contiguous() and qkv._base is not None
        seen["shape"] = tuple(qkv.shape)
        return qkv[:, :, 0]

    monkeypatch.setattr("flashtrain.models.attention.flash_attn_qkvpacked_func", look)
    module(x)
    assert seen == {"shares_memory": True, "shape": (2, 9, 3, 4, 8)}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((30, 4, 4), "4 heads for an embedding of 30. Possible: a number of heads that divides 30"),
        ((32, 0, 1), "0 heads for an embedding of 32"),
        ((32, 4, 3), "3 kv_heads for 4 heads. Possible: a number of kv_heads that divides 4"),
        ((1024, 2, 2), "head dimension 512 .* Possible: at most 256"),
    ],
)
def test_sizes_that_cannot_work_are_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        Attention(*sizes)


def test_documents_and_a_cache_together_are_refused(x, documents_of_lengths):
    with pytest.raises(UserError, match=r"documents together with a cache"):
        build()(x, documents=documents_of_lengths([9], [9]), cache=LayerCache(9))
