"""A model at a longer context than it was trained with."""

from __future__ import annotations

import pytest
import torch

from flashtrain.errors import UserError
from flashtrain.models import Decoder, DecoderConfig, RotaryPositions, with_context
from flashtrain.models.rope_scaling import RopeScaling

TOKENS = torch.arange(40)[None] % 13


def small(family: str = "gpt2", **changes) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig.of_size("demo", family, vocab_size=13, context=16)
    return Decoder(
        config.changed(**{"layers": 1, "embed": 32, "ffn": 32, **changes}), attention="sdpa"
    )


def extended(model: Decoder, context: int, **options) -> Decoder:
    config, state = with_context(model.config, model.state_dict(), context, **options)
    longer = Decoder(config, attention="sdpa")
    longer.load_state_dict(state)
    return longer


def test_learned_positions_do_not_fit_past_the_trained_ones_unless_asked_for():
    model = small()
    with pytest.raises(RuntimeError, match="position_embedding"):
        extended(model, 40)
    assert extended(model, 40, interpolate=True)(TOKENS).shape == (1, 40, 64)


def test_a_stretched_model_sees_the_trained_positions_where_they_lie_on_its_grid():
    model = small()
    longer = extended(model, 31, interpolate=True)  # every second position is a trained one
    torch.testing.assert_close(
        longer.position_embedding.weight[::2], model.position_embedding.weight
    )
    assert torch.equal(longer.token_embedding.weight, model.token_embedding.weight)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("context", [8, 16])
def test_a_context_that_is_no_longer_changes_nothing(family, context):
    model = small(family)
    config, state = with_context(model.config, model.state_dict(), context)
    assert config == model.config
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_rotary_positions_have_no_longest_and_give_what_they_gave():
    model = small("llama")
    longer = extended(model, 40)
    assert longer.config.context == 40
    torch.testing.assert_close(longer(TOKENS), model(TOKENS))


def test_a_rope_factor_raises_the_base_of_every_layer():
    longer = extended(small("llama"), 64, rope_factor=4.0)
    assert (longer.config.rope_base, longer.config.rope) == (10000.0, RopeScaling("ntk", 4.0))
    x, positions = torch.randn(1, 3, 2, 8), torch.tensor([[0, 7, 63]])
    raised = RotaryPositions(8, 10000.0 * 4 ** (8 / 6))
    assert torch.equal(longer.blocks[0].attention.rotary(x, positions), raised(x, positions))


def test_another_base_is_taken():
    assert (
        extended(small("llama"), 16, rope_base=500_000.0).blocks[0].attention.rotary.base
        == 500_000.0
    )


@pytest.mark.parametrize("option", ["rope_base", "rope_factor"])
def test_rotary_settings_are_refused_for_learned_positions(option):
    model = small()
    with pytest.raises(UserError, match=f"{option}=4 "):
        with_context(model.config, model.state_dict(), 16, **{option: 4.0})
    with pytest.raises(UserError, match=f"{option}=4 "):
        DecoderConfig.of_size("demo", vocab_size=13, context=16, **{option: 4.0})
