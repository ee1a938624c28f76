"""What our attention costs the host in a transformers model: waits for the device, and
Python around each layer.

A wait empties a GPU's queue, which a forward of short kernels does not fill again; so a
forward waits at most once.
"""

import sys

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from flashtrain.integrations import register_with_transformers
from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
from flashtrain_kernels import torch_attention

BATCH, LENGTH = 2, 12
IDS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
ONE_ROW = torch.arange(LENGTH)[None]
PACKED = torch.cat((torch.arange(5), torch.arange(7))).expand(BATCH, LENGTH).contiguous()
REAL = torch.ones(BATCH, LENGTH, dtype=torch.long)
PADDED = REAL.clone()
PADDED[0, 9:] = 0


def llama(
    layers: int = 2, attention: str | None = None, kind: type = LlamaForCausalLM
) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=32, attn_implementation=attention or register_with_transformers(),
    )  # fmt: skip
    return kind(config).double()


@pytest.fixture
def waits(monkeypatch):
    """The ways by which a tensor's numbers reached Python, as they would on a GPU."""
    seen = []
    # It looks at CPU tensors alone, which nobody waits for.
    monkeypatch.setattr(torch_attention, "_is_finite", lambda *_: True)
    for name in ("__bool__", "__int__", "__float__", "item", "tolist"):
        monkeypatch.setattr(Tensor, name, _told(seen, name, getattr(Tensor, name)))
    return seen


def _told(seen, name, own):
    return lambda *args: (seen.append(name), own(*args))[1]


CASES = {
    "nothing": ({}, 0),
    "no cache": ({"use_cache": False}, 0),
    "positions": ({"position_ids": ONE_ROW}, 1),
    "positions, no cache": ({"position_ids": ONE_ROW, "use_cache": False}, 1),
    "documents": ({"position_ids": PACKED}, 1),
    "documents, no cache": ({"position_ids": PACKED, "use_cache": False}, 1),
    "a mask of ones": ({"attention_mask": REAL}, 1),
    "padding": ({"attention_mask": PADDED}, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_a_forward_waits_for_the_device_once_at_most_and_not_for_positions_that_the_model_made(
    case, waits
):
    given, most = CASES[case]
    model = llama()
    for _ in range(2):
        waits.clear()
        model(IDS, **given)
        assert len(waits) <= most, waits


@pytest.mark.parametrize(("positions", "most"), [(None, 0), (ONE_ROW, 1), (PACKED, 1)])
def test_a_decoders_loss_waits_for_the_device_only_to_search_positions_that_it_was_given(
    positions, most, waits
):
    decoder = HuggingFaceDecoder(llama())
    labels = IDS.roll(-1, 1)
    for _ in range(2):
        waits.clear()
        decoder.loss(IDS, labels, positions=positions).backward()
        assert len(waits) <= most, waits
    waits.clear()
    logits = llama(attention="sdpa")(IDS, position_ids=positions, use_cache=False).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    found = decoder.loss(IDS, labels, positions=positions)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("use_cache", [True, False])
def test_documents_are_found_whatever_the_forward_before_was_given(use_cache):
    ours, sdpa = llama(), llama(attention="sdpa")
    for positions in (None, PACKED, None, ONE_ROW, PACKED):
        # With a cache it looks for none.
        wanted = sdpa(IDS, position_ids=positions, use_cache=False).logits
        got = ours(IDS, position_ids=positions, use_cache=use_cache).logits
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_positions_that_a_model_of_the_users_makes_are_searched():
    class Packing(LlamaModel):
        def forward(self, input_ids=None, **given):
            return super().forward(input_ids, position_ids=PACKED, **given)

    wanted = llama(attention="sdpa", kind=LlamaModel)(IDS, position_ids=PACKED, use_cache=False)
    got = llama(kind=Packing)(IDS)
    torch.testing.assert_close(got.last_hidden_state, wanted.last_hidden_state, rtol=0, atol=1e-12)


def test_a_forward_that_failed_prints_nothing_of_layers_that_are_called_by_themselves():
    model = llama(1, kind=LlamaModel)
    layer, hidden = model.layers[0], torch.randn(BATCH, LENGTH, 16, dtype=torch.double)
    rotary = model.rotary_emb(hidden, PACKED)
    wanted = layer(hidden, position_ids=PACKED, position_embeddings=rotary)
    with pytest.raises(IndexError):
        model(IDS + 1000)
    again = layer(hidden, position_ids=PACKED.clone(), position_embeddings=rotary)
    torch.testing.assert_close(again, wanted, rtol=0, atol=0)
    whole = layer(hidden, position_ids=ONE_ROW, position_embeddings=rotary)
    assert not torch.equal(whole, wanted)


def calls_of(model: LlamaForCausalLM, given: dict) -> int:
    """Python functions of flashtrain that a forward calls, the kernels' package not counted."""
    model(IDS, **given)
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call" and "/flashtrain/" in frame.f_code.co_filename.replace("\\", "/")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        model(IDS, **given)
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("case", CASES)
def test_a_layer_decides_nothing_that_its_batch_decides(case):
    """Two layers more cost twice a layer's calls: attention, its mask looked up, and what
    is short beside these."""
    given, _ = CASES[case]
    assert calls_of(llama(4), given) - calls_of(llama(2), given) <= 2 * 10
