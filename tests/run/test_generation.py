from __future__ import annotations

import pytest
import torch

from flashtrain.errors import UserError
from flashtrain.models import Decoder, DecoderConfig, generation
from flashtrain.models.generation import _seed, generate
from flashtrain.models.key_value_cache import cache_bytes
from flashtrain.models.trainable import as_trainable
from flashtrain_kernels import masks

CONTEXT = 12


def build(family: str, attention: str, **sizes) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig.of_size("demo", family, vocab_size=50, **{"context": CONTEXT, **sizes})
    model = Decoder(config, attention=attention, residual="weights").double()
    # Far enough from the start that the likeliest token is no near tie.
    for parameter in model.parameters():
        parameter.data *= 3
    return model


# With flash rows decode together, with sdpa one by one.
@pytest.fixture(params=[("gpt2", "flash"), ("llama", "sdpa")], ids="-".join)
def model(request) -> Decoder:
    return build(*request.param)


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


def test_a_module_whose_forward_returns_logits_writes_without_a_cache(model) -> None:
    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.decoder(tokens)

    own = as_trainable(Logits())
    assert own.can_generate
    assert not own.generates
    written = generate(own, PROMPT, 20, temperature=0, context=5)
    expected = PROMPT
    for _ in range(20):
        with torch.no_grad():
            likeliest = model(expected[:, -5:])[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, likeliest], 1)
    assert torch.equal(written, expected)


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
        ({"prompts": torch.zeros(1, 0, dtype=torch.int64)}, r"prompt of shape \(1, 0\)"),
        ({"prompts": torch.tensor([1, 2])}, r"prompt of shape \(2,\)"),
        ({"prompts": "a text"}, "prompt is a str.*flashtrain.load"),
        ({"prompts": [[1], []]}, "at least one token a row"),
        ({"prompts": torch.tensor([[50]])}, "below 50"),
        ({"prompts": [[1], [2, -1]]}, "token ids -1 to 2"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
    ],
)
def test_mistakes_are_refused_in_one_line(model, options, message):
    given = {"prompts": PROMPT, "max_new_tokens": 3, **options}
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


LENGTHS = (9, 1, 20, 3, 17)
UNEQUAL = [
    torch.randint(0, 50, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS
]
DECODERS = {
    "learned positions": {"family": "gpt2"},
    "grouped heads": {"family": "llama", "heads": 4, "kv_heads": 2},
    "windows": {"family": "llama", "pattern": ["window:5", "full"]},
}


@pytest.fixture(params=DECODERS)
def longer(request, monkeypatch) -> Decoder:
    """A decoder that reads prompts in pieces of 8 tokens, and none of these to its context."""
    monkeypatch.setattr(generation, "PIECE", 8)
    return build(**DECODERS[request.param], attention="flash", context=40)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_prompts_of_unequal_lengths_get_what_each_gets_alone(longer, temperature):
    together = generate(longer, UNEQUAL, 15, temperature=temperature, seed=3)
    for row, prompt in enumerate(UNEQUAL):
        alone = generate(longer, [prompt], 15, temperature=temperature, seed=_seed(3, row))
        assert together[row] == alone[0]
        assert together[row][: len(prompt)] == prompt
        if temperature == 0:
            longer.decodes_rows = False  # reads at once, and decodes by the layers' attention
            assert generate(longer, torch.tensor([prompt]), 15, temperature=0).tolist() == alone
            longer.decodes_rows = True


def test_logits_of_rows_that_decode_together_are_those_of_the_rows_read_whole(longer):
    for parameter in longer.float().eval().parameters():
        parameter.data /= 3  # as weights are at the start
    cache, further = longer.new_cache(24), [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    rows = [UNEQUAL[0], UNEQUAL[2], UNEQUAL[3]]
    with torch.no_grad():
        for row, text in enumerate(rows):
            cache.start_row(row, 3)
            longer(torch.tensor([text]), cache=cache, last_only=True)
        for step in range(4):
            positions = cache.decode([len(text) + step for text in rows], torch.device("cpu"))
            tokens = torch.tensor([one[step : step + 1] for one in further])
            found = longer(tokens, positions=positions, cache=cache)[:, -1, :50]
            for row, text in enumerate(rows):
                whole = torch.tensor([text + further[row][: step + 1]])
                wanted = longer(whole)[0, -1, :50]
                torch.testing.assert_close(found[row], wanted, atol=1e-5, rtol=1e-5)


def test_each_of_several_texts_ends_with_its_own_end(longer):
    greedy = generate(longer, UNEQUAL, 15, temperature=0)
    ends = [greedy[0][LENGTHS[0] + 4], greedy[2][LENGTHS[2] + 1]]
    for row, text in enumerate(generate(longer, UNEQUAL, 15, temperature=0, end_of_text=ends)):
        new = greedy[row][LENGTHS[row] :]
        count = min((new.index(end) + 1 for end in ends if end in new), default=15)
        assert text == greedy[row][: LENGTHS[row] + count]


def test_a_text_that_passes_the_context_leaves_the_others_as_they_are(longer):
    prompts = [*UNEQUAL, list(range(45))]
    together = generate(longer, prompts, 30, temperature=0)
    assert together == [generate(longer, [one], 30, temperature=0)[0] for one in prompts]


@pytest.mark.parametrize(("tokens", "groups"), [(70, [2, 2, 1]), (35, [1] * 5), (1000, [5])])
def test_as_many_rows_decode_together_as_their_caches_fit(longer, monkeypatch, tokens, groups):
    def planned(tokens: int) -> int:
        return cache_bytes(longer.config.layers, tokens, torch.float64)

    free, started = tokens / 35 * planned(35), []  # the longest text has 35 in the end
    wanted = generate(longer, UNEQUAL, 15, temperature=0)
    monkeypatch.setattr(generation, "_free_bytes", lambda device: free)
    make = longer.new_cache
    monkeypatch.setattr(
        longer, "new_cache", lambda size: started.append(cache := make(size)) or cache
    )
    assert generate(longer, UNEQUAL, 15, temperature=0) == wanted
    assert [cache.layers[0].keys.shape[0] for cache in started] == groups
    for cache, rows in zip(started, groups, strict=True):
        held = sum(one.keys.nbytes + one.values.nbytes for one in cache.layers)
        assert held == rows * planned(cache.layers[0].context) <= free
        for layer, spec in zip(cache.layers, longer.config.layers, strict=True):
            window = spec.mixer.window or layer.context
            assert layer.keys.shape[1] == min(window, layer.context)


def test_a_cache_that_does_not_fit_is_refused_with_its_bytes(longer, monkeypatch):
    needed = cache_bytes(longer.config.layers, 35, torch.float64)
    monkeypatch.setattr(generation, "_free_bytes", lambda device: needed - 1)
    message = f"35 tokens takes {needed:,} bytes: expected at most {needed - 1:,}"
    with pytest.raises(UserError, match=message):
        generate(longer, UNEQUAL, 15)


def test_several_prompts_under_a_mask_get_what_each_gets_alone(longer):
    def window(seqlen, device, **_):
        return masks.sliding_window(seqlen, (6, 0), device=device)

    together = generate(longer, UNEQUAL, 9, temperature=0, mask=window)
    for prompt, text in zip(UNEQUAL, together, strict=True):
        one = torch.tensor([prompt])
        for _ in range(9):
            seen = masks.sliding_window(one.shape[1], (6, 0))
            one = torch.cat((one, longer(one, mask=seen)[:, -1:].argmax(-1)), 1)
        assert text == one[0].tolist()


def test_rows_of_equal_length_are_read_at_once_under_a_mask(longer, monkeypatch):
    def window(seqlen, device, **_):
        return masks.sliding_window(seqlen, (6, 0), device=device)

    prompts = torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(4))
    alone = [generate(longer, one[None], 40, temperature=0, mask=window) for one in prompts]
    calls, hidden = [], longer.hidden
    monkeypatch.setattr(
        longer, "hidden", lambda ids, **more: calls.append(len(ids)) or hidden(ids, **more)
    )
    together = generate(longer, prompts, 40, temperature=0, mask=window)
    assert torch.equal(together, torch.cat(alone))  # past the context too
    assert calls == [3] * 40


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [None, 7])
def test_top_p_leaves_the_tokens_that_transformers_leaves(monkeypatch, top_k, top_p) -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    theirs = logits / 0.7
    if top_k is not None:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    theirs = TopPLogitsWarper(top_p)(None, theirs).softmax(dim=-1)
    ours = []

    def drawn(row: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        ours.append(row)
        return row.argmax(dim=-1, keepdim=True)

    monkeypatch.setattr(torch, "multinomial", drawn)
    generation._draw([None] * 4, 0.7, top_k, top_p, logits)
    torch.testing.assert_close(torch.stack(ours), theirs)
    assert torch.equal(torch.stack(ours) == 0, theirs == 0)


def test_tokens_are_streamed_in_the_order_and_with_the_rows_of_the_result(longer) -> None:
    prompts, seen = [[1, 2, 3, 4], [5], [6, 7]], {}
    found = generate(
        longer, prompts, 9, stream=lambda row, token: seen.setdefault(row, []).append(token)
    )
    assert [[*prompt, *seen[row]] for row, prompt in enumerate(prompts)] == found
