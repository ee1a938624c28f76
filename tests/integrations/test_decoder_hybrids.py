"""Our decoders with states in transformers' formats: transformers' own classes read them and give
the same logits in float32."""

from __future__ import annotations

import pytest
import torch
import transformers

from flashtrain.integrations import load_decoder, save_decoder
from flashtrain.models import Decoder, DecoderConfig

GRANITE, QWEN = "granitemoehybrid", "qwen3_5_text"


def decoder(pattern: list[str], **changes: object) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig.of_size(
        "demo",
        changes.pop("family", "llama"),
        vocab_size=61,
        context=64,
        layers=3,
        width=32,
        heads=4,
        pattern=pattern,
    ).changed(**changes)
    model = Decoder(config, attention="sdpa", residual="weights").eval()
    for one in model.parameters():  # norms and decays that differ, and logits far from 0
        one.data = one.data * 5 if one.dim() > 1 else one.data + torch.randn_like(one) / 10
    return model


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False, "rope_base": 500.0}], ids=str)
@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        (["mamba2", "full"], GRANITE),
        (["mamba2", "nope"], GRANITE),
        (["mamba2"], GRANITE),
        (["delta"], QWEN),
    ],
    ids=str,
)
def test_transformers_gives_our_logits(pattern, kind, changes, tmp_path):
    model, tokens = decoder(pattern, **changes), torch.randint(0, 61, (2, 40))
    assert kind in save_decoder(model, tmp_path, end_of_text=3)
    made = transformers.AutoModelForCausalLM
    theirs, info = made.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert theirs.config.model_type == kind
    ours = model(tokens)[..., :61]
    torch.testing.assert_close(theirs.eval()(tokens).logits, ours, rtol=0, atol=1e-4)
    written = theirs.generate(tokens, max_new_tokens=1, do_sample=False)[:, -1]
    assert torch.equal(written, ours[:, -1].argmax(-1))


@pytest.mark.parametrize(
    ("pattern", "family"),
    [
        (["delta", "full"], "llama"),  # Qwen3.5's attention is gated and normed
        (["mamba2", "window:8"], "llama"),
        (["mamba2", "full", "nope"], "llama"),
        (["mamba2", "delta"], "llama"),
        (["mamba2"], "gpt2"),
        (["retention"], "llama"),
        (["full"], "transnormer"),
    ],
    ids=str,
)
def test_layers_that_no_class_of_transformers_has_are_in_our_format(pattern, family, tmp_path):
    model, tokens = decoder(pattern, family=family), torch.randint(0, 61, (2, 40))
    assert "flashtrain's own format" in save_decoder(model, tmp_path)
    config, state = load_decoder(tmp_path)
    again = Decoder(config, attention="sdpa", residual="weights").eval()
    again.load_state_dict(state)
    assert torch.equal(again(tokens), model(tokens))
