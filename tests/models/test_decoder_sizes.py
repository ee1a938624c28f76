"""What a model is made of: its sizes and published parameter counts, its first weights, and
shapes that are refused."""

from __future__ import annotations

import math

import pytest
import torch
from test_decoder import build, small_config

from flashtrain.errors import UserError
from flashtrain.models import SIZES, Decoder, DecoderConfig

FAMILIES = ["gpt2", "llama"]


# Sizes


def on_meta(
    size: str, family: str = "gpt2", vocab_rows: int = 50257, context: int = 1024
) -> Decoder:
    config = DecoderConfig.of_size(
        size, family, vocab_size=50257, vocab_rows=vocab_rows, context=context
    )
    with torch.device("meta"):
        return Decoder(config, attention="sdpa")


@pytest.mark.parametrize(
    ("size", "published"),
    [("124m", 124_439_808), ("355m", 354_823_168), ("774m", 774_030_080), ("1.5b", 1_557_611_200)],
)
def test_gpt2_has_exactly_the_published_parameters(size, published):
    assert on_meta(size).parameter_count() == published


def test_the_1_3b_size_has_heads_of_128_and_gpt3_xls_parameters():
    model = on_meta("1.3b", context=2048)
    assert {layer.mixer.head_dim for layer in model.config.layers} == {128}
    assert model.parameter_count() == pytest.approx(1.3158e9, rel=0.01)


def test_the_demo_size_has_about_a_million_parameters():
    config = DecoderConfig.of_size("demo", vocab_size=257, context=256)
    assert Decoder(config, attention="sdpa").parameter_count() == pytest.approx(0.87e6, rel=0.02)


@pytest.mark.parametrize("size", [size for size in SIZES if size != "demo"])
def test_the_modern_family_is_of_the_same_sizes(size):
    model = on_meta(size, "llama")
    assert model.parameter_count() == pytest.approx(on_meta(size).parameter_count(), rel=0.15)
    layer = model.config.alike
    assert layer.mixer.kv_heads < layer.mixer.heads
    assert layer.feed_forward.width % 128 == 0
    assert not any("bias" in name for name, _ in model.named_parameters())


def test_vocab_rows_default_to_a_multiple_of_64():
    assert DecoderConfig.of_size("124m", vocab_size=50257, context=1024).vocab_rows == 50304


def test_flops_per_token_give_the_measured_mfu_of_gpt2_124m():
    model = on_meta("124m", vocab_rows=50304)
    flops = model.flops_per_token()
    looked_up = 1024 * 768
    assert flops == 6 * (model.parameter_count() - looked_up) + 12 * 12 * 768 * 1024 / 2
    assert 492e3 * flops / 989e12 == pytest.approx(0.40, abs=0.005)
    assert model.flops_per_token(2048) - flops == 12 * 12 * 768 * 1024 / 2


def test_an_untied_input_embedding_adds_no_flops():
    assert (
        build(tie_embeddings=False).flops_per_token()
        == build(tie_embeddings=True).flops_per_token()
    )


# Initial weights


def test_weights_start_as_gpt2s_do():
    torch.manual_seed(0)
    model = Decoder(small_config(embed=128, ffn=512, layers=4), attention="sdpa")
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert bool((parameter == 1).all()), name
        else:
            residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
            std = 0.02 / math.sqrt(8) if residual else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.06), name
            assert abs(parameter.mean().item()) < 0.1 * std, name


# Mistakes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "heads=5"),
        ({"kv_heads": 3}, "kv_heads=3"),
        ({"embed": 4096}, "head dimension 1024 .* at most 512"),
        ({"embed": 36, "positions": "rotary"}, "head dimension 9"),
        ({"context": 0}, "context=0"),
        ({"vocab_rows": 49}, "vocab_rows=49"),
        ({"positions": "rotery"}, "positions 'rotery'"),
        ({"activation": "gellu"}, "activation 'gellu'"),
        ({"dropout": 1.5}, "dropout=1.5"),
        ({"positions": "rotary", "rope_base": 0.0}, "rope_base=0"),
    ],
)
def test_a_shape_that_cannot_work_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        small_config(**changes)
