"""model=plain: the same start, loss and gradients as model=gpt2."""

import pytest
import torch

from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain.run.components import make_model
from flashtrain_recipes.step_benchmark.plain_training import PlainTrainable

DEMO = ["recipe=gpt2", "model.size=demo", "model.vocab_rows=null", "context=32"]


def built(name: str, seed: int = 3, **options):
    settings = compose_settings([*DEMO, f"model={name}", *(f"model.{key}={value}" for key, value in options.items())])
    torch.manual_seed(seed)
    return make_model(settings, vocab_size=320, attention="sdpa").double()


def test_it_starts_from_the_weights_of_gpt2_and_has_its_loss_and_gradients():
    plain, ours = built("plain"), built("gpt2")
    tokens = torch.randint(0, 320, (2, 33))
    losses = []
    for model in (plain, ours):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    for mine, theirs in (("tokens", "token_embedding"), ("blocks.1.qkv", "blocks.1.attention.qkv")):
        gradients = plain.get_submodule(f"inner.{mine}").weight.grad, ours.get_submodule(theirs).weight.grad
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
    assert isinstance(plain, PlainTrainable)
    assert plain.parameter_count() == ours.parameter_count()
    assert plain.flops_per_token(32) == ours.flops_per_token(32)


def test_parts_it_has_not_are_refused_in_a_line():
    with pytest.raises(UserError, match="learned positions and no dropout"):
        built("plain", positions="rotary")
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(UserError, match="document_mask"):
        built("plain").loss(tokens, tokens, positions=tokens)
