from __future__ import annotations

import pytest
import torch

from flashtrain.errors import UserError
from flashtrain.models import Decoder, DecoderConfig
from flashtrain.models.generation import generate

CONTEXT = 12


@pytest.fixture(params=["gpt2", "llama"])
def model(request) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig.of_size("demo", request.param, vocab_size=50, context=CONTEXT)
    model = Decoder(config, attention="sdpa").double()
    # Far enough from the start that the likeliest token is no near tie.
    for parameter in model.parameters():
        parameter.data *= 3
    return model


PROMPT = torch.tensor([[1, 2, 3], [7, 8, 9]])


def recomputed(model: Decoder, tokens: torch.Tensor, new: int) -> torch.Tensor:
    """Greedy continuation without a cache: the documented window is read whole for every token."""
    first = max(0, tokens.shape[1] - CONTEXT)
    for _ in range(new):
        if tokens.shape[1] - first > CONTEXT:
            first = tokens.shape[1] - CONTEXT // 2
        with torch.no_grad():
            tokens = torch.cat((tokens, model(tokens[:, first:])[:, -1:].argmax(dim=-1)), dim=1)
    return tokens


@pytest.mark.parametrize("length", [1, 3, CONTEXT, CONTEXT + 5])
def test_greedy_with_the_cache_equals_reading_everything_again_even_past_the_context(model, length):
    prompt = torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(2))
    assert torch.equal(generate(model, prompt, 40, temperature=0), recomputed(model, prompt, 40))


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others(model):
    first = generate(model, PROMPT, 20, seed=1)
    assert torch.equal(first, generate(model, PROMPT, 20, seed=1))
    assert not torch.equal(first, generate(model, PROMPT, 20, seed=2))


def test_only_real_tokens_are_drawn(model):
    assert model.config.vocab_rows > 50
    out = generate(model, PROMPT, 200, temperature=100.0, top_k=None)
    assert out.max().item() < 50


def test_a_row_that_ends_is_filled_and_generation_stops_when_all_have_ended(model):
    greedy = generate(model, PROMPT[:1], 10, temperature=0)
    end = int(greedy[0, 5])
    out = generate(model, PROMPT[:1], 10, temperature=0, end_of_text=end)
    first = greedy[0, 3:].tolist().index(end)
    assert torch.equal(out, greedy[:, : 3 + first + 1])
    both = generate(model, PROMPT, 10, temperature=0, end_of_text=end)
    assert bool((both[0, 3 + first :] == end).all())


def test_any_of_several_ends_finishes_a_row(model):
    greedy = generate(model, PROMPT, 10, temperature=0)
    unused = next(token for token in range(50) if token not in greedy[:, 3:])
    ends = [unused, int(greedy[0, 5]), int(greedy[1, 6])]
    out = generate(model, PROMPT, 10, temperature=0, end_of_text=ends)
    last = [next(place for place in range(3, 13) if int(row[place]) in ends) for row in greedy]
    assert out.shape[1] == max(last) + 1
    for row, found, place in zip(greedy, out, last, strict=True):
        assert torch.equal(found[: place + 1], row[: place + 1])
        assert bool((found[place + 1 :] == unused).all())


def test_the_models_mode_is_restored_and_no_gradient_is_kept(model):
    model.train()
    out = generate(model, PROMPT, 2)
    assert model.training
    assert not out.requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": torch.zeros(1, 0, dtype=torch.int64)}, r"prompt of shape \(1, 0\)"),
        ({"tokens": torch.tensor([[50]])}, "below 50"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
    ],
)
def test_mistakes_are_refused_in_one_line(model, options, message):
    given = {"tokens": PROMPT, "max_new_tokens": 3, **options}
    with pytest.raises(UserError, match=message):
        generate(model, **given)


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_reported_in_one_line(model, temperature, value):
    next(model.blocks[0].parameters()).data.fill_(value)
    with pytest.raises(UserError, match="NaN"):
        generate(model, PROMPT, 3, temperature=temperature)


@pytest.mark.parametrize("options", [{"temperature": 1e-40}, {"temperature": 1e-5}, {"top_k": 1}])
def test_a_temperature_near_0_and_top_k_of_one_take_the_likeliest_token(model, options):
    assert torch.equal(
        generate(model, PROMPT, 10, **options), generate(model, PROMPT, 10, temperature=0)
    )


@pytest.mark.parametrize(
    ("prompt", "new", "tokens"), [(3, 5, 8), (3, 40, CONTEXT), (CONTEXT + 5, 1, CONTEXT)]
)
def test_the_cache_takes_the_memory_of_the_tokens_and_not_of_the_context(
    model, monkeypatch, prompt, new, tokens
):
    asked = []
    make = model.new_cache
    monkeypatch.setattr(model, "new_cache", lambda size: asked.append(size) or make(size))
    generate(model, torch.ones(1, prompt, dtype=torch.long), new)
    assert set(asked) == {tokens}
