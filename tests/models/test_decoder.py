from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flashtrain.errors import UserError
from flashtrain.models import Decoder, DecoderConfig
from flashtrain.models.activation_checkpointing import MemorySavings

KINDS = ["flash", "sdpa", "standard"]
FAMILIES = ["gpt2", "llama"]


def small_config(family: str = "gpt2", **changes) -> DecoderConfig:
    config = DecoderConfig.of_size("demo", family, vocab_size=50, context=16)
    return config.changed(**{"layers": 2, "embed": 32, "ffn": 48, **changes})


# float64 shows that two ways are the same to the last digit.
def build(family: str = "gpt2", attention: str = "sdpa", **changes) -> Decoder:
    torch.manual_seed(0)
    return Decoder(small_config(family, **changes), attention=attention).double()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packed", [False, True])
def test_every_attention_gives_the_same_loss_and_gradients(family, packed, tokens, mask_of_lengths):
    mask = mask_of_lengths([5, 7], [1, 11]) if packed else None
    results = {}
    for kind in KINDS:
        model = build(family, kind)
        loss = model.loss(tokens, tokens.roll(-1, 1), mask=mask)
        results[kind] = [loss, *torch.autograd.grad(loss, list(model.parameters()))]
    for kind in ("sdpa", "flash"):
        torch.testing.assert_close(results[kind], results["standard"], atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_train_as_separate_rows_do(family, kind, tokens, mask_of_lengths):
    model = build(family, kind)
    weights = list(model.parameters())
    labels = tokens.roll(-1, 1)
    positions = torch.tensor([[*range(5), *range(7)]], dtype=torch.int32).expand(2, -1)
    packed = model.loss(tokens, labels, positions=positions, mask=mask_of_lengths([5, 7], [5, 7]))
    first, second = (
        model.loss(tokens[:, part], labels[:, part]) for part in (slice(0, 5), slice(5, 12))
    )
    separate = (5 * first + 7 * second) / 12
    torch.testing.assert_close(packed, separate, atol=1e-12, rtol=0)
    wanted = torch.autograd.grad(separate, weights)
    torch.testing.assert_close(torch.autograd.grad(packed, weights), wanted, atol=1e-12, rtol=0)


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
    model = build("llama", tie_embeddings=False)
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
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), atol=1e-12, rtol=0)
    assert cache.length == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "packed"),
    [
        ("gpt2", "flash", True),
        ("gpt2", "standard", False),
        ("llama", "flash", False),
        ("llama", "sdpa", True),
    ],
)
def test_the_loss_compiles_whole(family, kind, packed, tokens, mask_of_lengths):
    torch.compiler.reset()
    model = build(family, kind, vocab_rows=64)
    mask = mask_of_lengths([5, 7], [12]) if packed else None
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    positions = torch.arange(12, dtype=torch.int32).expand(2, -1)
    expected = model.loss(tokens, tokens, positions=positions, mask=mask)
    loss = compiled(tokens, tokens, positions=positions, mask=mask)
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=0)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    torch.testing.assert_close(
        torch.autograd.grad(loss, list(model.parameters())), wanted, atol=1e-12, rtol=0
    )


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


def test_the_last_tokens_logits_alone_are_the_same(tokens):
    model = build()
    torch.testing.assert_close(
        model(tokens, last_only=True), model(tokens)[:, -1:], atol=1e-12, rtol=0
    )


def test_learned_positions_past_the_context_are_refused_and_rotary_ones_are_not():
    long = torch.zeros(1, 17, dtype=torch.int64)
    with pytest.raises(UserError, match=r"17 positions for a model with 16 learned ones"):
        build()(long)
    assert build("llama")(long).shape[1] == 17


@pytest.mark.parametrize(
    ("residual", "dtype"), [("weights", torch.float32), ("compute", torch.bfloat16)]
)
def test_under_autocast_the_residual_stream_is_kept_as_asked(residual, dtype):
    model = Decoder(
        small_config(vocab_size=17, vocab_rows=20, context=9, heads=2, kv_heads=2, embed=8, ffn=16),
        "sdpa",
        residual,
    )
    seen = []
    model.blocks[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    tokens = torch.arange(9)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model.loss(tokens, tokens)
    assert seen == [dtype]
    torch.testing.assert_close(half, model.loss(tokens, tokens), rtol=2e-2, atol=2e-2)
    assert seen[1:] == [torch.float32]


@pytest.mark.parametrize(
    "savings", [MemorySavings(), MemorySavings("selective", ffn_chunk=8, loss_chunk=8)], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_on_the_meta_device_shapes_are_those_of_the_cpu(
    family, kind, savings, tokens, mask_of_lengths
):
    shapes = {}
    for device in ("cpu", "meta"):
        model = build(family, kind, dropout=0.1).to(device)
        model.save_memory(savings)
        mask = mask_of_lengths([5, 7], [1, 11])
        rows = tokens.to(device)
        loss = model.loss(rows, rows, mask=mask._replace(queries=mask.queries.to(device)))
        made = [model(rows), loss, *torch.autograd.grad(loss, list(model.parameters()))]
        shapes[device] = [(x.shape, x.dtype) for x in made]
        assert {x.device.type for x in made} == {device}
    assert shapes["meta"] == shapes["cpu"]
