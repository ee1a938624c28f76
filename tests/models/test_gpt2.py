from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from flashtrain.errors import UserError
from flashtrain.models import GPT2, SIZES, GPT2Config

KINDS = ["flash", "sdpa", "standard"]
# float64 shows that two ways are the same to the last digit; flash computes in float32 at most.
DTYPES = {"flash": torch.float32, "sdpa": torch.float64, "standard": torch.float64}
TOLERANCES = {"flash": 1e-5, "sdpa": 1e-12, "standard": 1e-12}
FAMILIES = ["gpt2", "modern"]


def small_config(family: str = "gpt2", **changes) -> GPT2Config:
    config = GPT2Config.of_size("demo", family, vocab_size=50, context=16)
    return replace(config, **{"layers": 2, "embed": 32, "ffn": 48, **changes})


def build(family: str = "gpt2", attention: str = "sdpa", **changes) -> GPT2:
    torch.manual_seed(0)
    return GPT2(small_config(family, **changes), attention=attention).to(DTYPES[attention])


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))


# Sizes


def on_meta(size: str, family: str = "gpt2", vocab_rows: int = 50257, context: int = 1024) -> GPT2:
    config = GPT2Config.of_size(size, family, vocab_size=50257, vocab_rows=vocab_rows, context=context)
    with torch.device("meta"):
        return GPT2(config, attention="sdpa")


@pytest.mark.parametrize(
    ("size", "published"),
    [("124m", 124_439_808), ("355m", 354_823_168), ("774m", 774_030_080), ("1.5b", 1_557_611_200)],
)
def test_gpt2_has_exactly_the_published_parameters(size, published):
    assert on_meta(size).parameter_count() == published


def test_the_1_3b_size_has_heads_of_128_and_gpt3_xls_parameters():
    model = on_meta("1.3b", context=2048)
    assert model.config.head_dim == 128
    assert model.parameter_count() == pytest.approx(1.3158e9, rel=0.01)


def test_the_demo_size_has_about_a_million_parameters():
    config = GPT2Config.of_size("demo", vocab_size=257, context=256)
    assert GPT2(config, attention="sdpa").parameter_count() == pytest.approx(0.87e6, rel=0.02)


@pytest.mark.parametrize("size", [size for size in SIZES if size != "demo"])
def test_the_modern_family_is_of_the_same_sizes(size):
    model = on_meta(size, "modern")
    assert model.parameter_count() == pytest.approx(on_meta(size).parameter_count(), rel=0.15)
    assert model.config.kv_heads < model.config.heads
    assert model.config.ffn % 128 == 0
    assert not any("bias" in name for name, _ in model.named_parameters())


def test_vocab_rows_default_to_a_multiple_of_64():
    assert GPT2Config.of_size("124m", vocab_size=50257, context=1024).vocab_rows == 50304


def test_flops_per_token_give_the_measured_mfu_of_gpt2_124m():
    model = on_meta("124m", vocab_rows=50304)
    flops = model.flops_per_token()
    looked_up = 1024 * 768
    assert flops == 6 * (model.parameter_count() - looked_up) + 12 * 12 * 768 * 1024 / 2
    assert 492e3 * flops / 989e12 == pytest.approx(0.40, abs=0.005)
    assert model.flops_per_token(2048) - flops == 12 * 12 * 768 * 1024 / 2


def test_an_untied_input_embedding_adds_no_flops():
    assert build(tie_embeddings=False).flops_per_token() == build(tie_embeddings=True).flops_per_token()


# Initial weights


def test_weights_start_as_gpt2s_do():
    torch.manual_seed(0)
    model = GPT2(small_config(embed=128, ffn=512, layers=4), attention="sdpa")
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


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_loss_is_that_of_guessing(family, tokens):
    assert build(family).loss(tokens, tokens.roll(-1, 1)).item() == pytest.approx(math.log(50), abs=0.1)


# What the model computes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packed", [False, True])
def test_every_attention_gives_the_same_loss_and_gradients(family, packed, tokens, documents_of_lengths):
    documents = documents_of_lengths([5, 7], [1, 11]) if packed else None
    results = {}
    for kind in KINDS:
        model = build(family, kind)
        loss = model.loss(tokens, tokens.roll(-1, 1), documents=documents)
        results[kind] = [loss, *torch.autograd.grad(loss, list(model.parameters()))]
    for kind, tolerance in (("sdpa", 1e-10), ("flash", 1e-5)):
        for ours, exact in zip(results[kind], results["standard"], strict=True):
            torch.testing.assert_close(ours.double(), exact.double(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_later_token_changes_no_earlier_prediction(family, kind, tokens):
    model = build(family, kind)
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 50
    assert torch.equal(model(tokens)[:, :7], model(changed)[:, :7])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_document_is_predicted_as_if_it_stood_alone(family, kind, tokens, documents_of_lengths):
    model = build(family, kind)
    positions = torch.tensor([[*range(5), *range(7)]], dtype=torch.int32).expand(2, -1)
    together = model(tokens, positions=positions, documents=documents_of_lengths([5, 7], [5, 7]))[..., :50]
    alone = model(tokens[:, 5:])[..., :50]
    torch.testing.assert_close(together[:, 5:], alone, atol=TOLERANCES[kind], rtol=0)
    changed = tokens.clone()
    changed[:, :5] = (changed[:, :5] + 1) % 50
    other = model(changed, positions=positions, documents=documents_of_lengths([5, 7], [5, 7]))[..., :50]
    assert torch.equal(together[:, 5:], other[:, 5:])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_the_mean_over_labels_that_are_not_ignored(family, tokens):
    model = build(family)
    labels = tokens.roll(-1, 1)
    labels[:, -3:] = -100
    logits = model(tokens)[:, :-3, :50]
    expected = F.cross_entropy(logits.flatten(0, 1), labels[:, :-3].flatten())
    torch.testing.assert_close(model.loss(tokens, labels), expected, atol=1e-12, rtol=0)


def test_the_loss_of_no_labels_is_zero_and_has_gradients(tokens):
    model = build()
    loss = model.loss(tokens, torch.full_like(tokens, -100))
    loss.backward()
    assert loss.item() == 0
    assert not model.token_embedding.weight.grad.any()


def test_the_loss_is_float32_in_a_bfloat16_model(tokens):
    assert build().bfloat16().loss(tokens, tokens).dtype == torch.float32


def test_rows_that_stand_for_no_token_are_never_predicted_and_never_trained(tokens):
    model = build(vocab_rows=64)
    logits = model(tokens)
    assert logits.shape == (2, 12, 64)
    assert bool((logits[..., 50:] == -torch.inf).all())
    model.loss(tokens, tokens).backward()
    assert not model.token_embedding.weight.grad[50:].any()
    assert bool(model.token_embedding.weight.grad.isfinite().all())


def test_an_untied_head_has_its_own_weights(tokens):
    model = build("modern", tie_embeddings=False)
    assert model.head.weight is not model.token_embedding.weight
    model.loss(tokens, tokens).backward()
    assert bool(model.head.weight.grad.any())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_reading_with_a_cache_gives_the_same_logits(family, kind, tokens):
    model = build(family, kind)
    cache = model.new_cache()
    with torch.no_grad():
        pieces = [model(piece, cache=cache) for piece in tokens.split([5, 1, 1, 4, 1], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), atol=TOLERANCES[kind], rtol=0)
    assert cache.length == 12


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_compiles_whole(family, kind, packed, tokens, documents_of_lengths):
    torch.compiler.reset()
    model = build(family, kind, vocab_rows=64)
    documents = documents_of_lengths([5, 7], [12]) if packed else None
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    positions = torch.arange(12, dtype=torch.int32).expand(2, -1)
    expected = model.loss(tokens, tokens, positions=positions, documents=documents)
    loss = compiled(tokens, tokens, positions=positions, documents=documents)
    torch.testing.assert_close(loss, expected, atol=TOLERANCES[kind], rtol=0)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    for ours, theirs in zip(torch.autograd.grad(loss, list(model.parameters())), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCES[kind], rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_to_bfloat16_stays_near_the_exact_loss(family, kind, tokens):
    model = build(family, kind).float()
    exact = model.loss(tokens, tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(tokens, tokens)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=5e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_few_steps_learn_a_repeated_text(family):
    torch.manual_seed(0)
    model = GPT2(small_config(family), attention="sdpa")
    tokens = (torch.arange(16) % 5).expand(4, -1).clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_the_last_tokens_logits_alone_are_the_same(tokens):
    model = build()
    torch.testing.assert_close(model(tokens, last_only=True), model(tokens)[:, -1:], atol=1e-12, rtol=0)


# Mistakes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "5 heads for an embedding of 32. Possible: a number of heads that divides 32"),
        ({"kv_heads": 3}, "3 kv_heads for 4 heads. Possible: a number of kv_heads that divides 4"),
        ({"embed": 2048}, "head dimension 512 .* Possible: at most 256"),
        ({"embed": 36, "positions": "rotary"}, "head dimension 9 with rotary positions. Possible: an even"),
        ({"context": 0}, "context 0. Possible: 1 or more"),
        ({"vocab_rows": 49}, "vocab_rows 49 for 50 tokens. Possible: 50 or more"),
        ({"positions": "rotery"}, "unknown positions 'rotery'. Did you mean 'rotary'"),
        ({"norm": "layer_norm"}, "unknown norm 'layer_norm'. Did you mean 'layernorm'"),
        ({"activation": "gellu"}, "unknown activation 'gellu'. Did you mean 'gelu'"),
        ({"dropout": 1.5}, "dropout 1.5. Possible: 0 up to"),
        ({"positions": "rotary", "rope_base": 0.0}, "rope_base 0. Possible: a number above 1"),
    ],
)
def test_a_shape_that_cannot_work_is_refused_in_one_line(changes, message):
    with pytest.raises(UserError, match=message) as caught:
        small_config(**changes)
    assert "\n" not in str(caught.value)


def test_an_unknown_size_or_family_is_refused():
    with pytest.raises(UserError, match=r"unknown model size '125m'. Did you mean '124m'"):
        GPT2Config.of_size("125m", vocab_size=50, context=16)
    with pytest.raises(UserError, match=r"unknown model family 'modren'. Did you mean 'modern'"):
        GPT2Config.of_size("124m", "modren", vocab_size=50, context=16)


def test_flash_with_dropout_is_refused_when_the_model_is_built():
    with pytest.raises(UserError, match=r"dropout 0.1 with attention=flash"):
        build(attention="flash", dropout=0.1)


def test_learned_positions_past_the_context_are_refused_and_rotary_ones_are_not():
    long = torch.zeros(1, 17, dtype=torch.int64)
    with pytest.raises(UserError, match=r"17 positions for a model with 16 learned ones"):
        build()(long)
    assert build("modern")(long).shape[1] == 17
