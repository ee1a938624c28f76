"""Own decoders with scaled rotary positions have transformers' logits: exported,
imported, and by settings."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain.integrations import load_decoder, save_decoder
from flashtrain.models import Decoder
from flashtrain.models.rope_scaling import RopeScaling
from flashtrain.tasks.decoders import make_model
from flashtrain.tasks.language.starting_weights import weights_at_context

TOKENS = torch.randint(61, (1, 512), generator=torch.Generator().manual_seed(0))
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALINGS = {
    "linear": {"factor": 8.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
    "yarn of another form": {"rope_type": "yarn", "factor": 8.0,
                             "original_max_position_embeddings": 64, "mscale": 0.7,
                             "mscale_all_dim": 1.1, "beta_fast": 16, "beta_slow": 2,
                             "truncate": False},
}  # fmt: skip


@torch.no_grad()
def largest_difference(ours: Decoder, theirs: torch.nn.Module) -> float:
    return float((ours.eval()(TOKENS)[..., :61] - theirs.eval()(TOKENS).logits).abs().max())


def with_large_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Attention that depends on positions: at initial weights they hardly matter."""
    torch.manual_seed(0)
    for name, one in model.named_parameters():
        one.data = 0.06 * torch.randn_like(one) + (1.0 if "norm" in name else 0.0)
    return model


def their_llama(folder, **entries) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, rms_norm_eps=1e-5,
        tie_word_embeddings=False, **entries,
    )  # fmt: skip
    model = with_large_weights(transformers.LlamaForCausalLM(config))
    model.save_pretrained(folder)
    return model


def read_by_us(folder) -> Decoder:
    config, state = load_decoder(folder)
    model = Decoder(config, attention="sdpa")
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("name", SCALINGS)
def test_a_llama_of_transformers_starts_an_own_decoder_and_returns(name, tmp_path) -> None:
    theirs = their_llama(
        tmp_path / "theirs",
        rope_parameters={"rope_type": name, "rope_theta": 777.0, **SCALINGS[name]},
    )
    ours = read_by_us(tmp_path / "theirs")
    assert ours.config.rope_base == 777.0
    assert largest_difference(ours, theirs) < 1e-5
    unscaled = Decoder(ours.config.changed(rope_factor=1.0), attention="sdpa")
    unscaled.load_state_dict(ours.state_dict())
    assert largest_difference(unscaled, theirs) > 1e-3
    save_decoder(ours, tmp_path / "ours")
    returned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert largest_difference(ours, returned) < 1e-5
    assert read_by_us(tmp_path / "ours").config == ours.config


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_a_scaling_by_settings_is_that_of_transformers(kind, tmp_path) -> None:
    words = [
        "recipe=gpt2",
        "model=llama",
        "model.size=demo",
        "context=512",
        f"model.rope={kind}",
        "model.rope_factor=8",
    ]
    settings = compose_settings(words)
    model = with_large_weights(
        make_model(settings.model, vocab_size=61, context=512, attention="sdpa")
    )
    save_decoder(model, tmp_path)
    entries = {"rope_type": kind, **SCALINGS[kind], "rope_theta": 1e4}
    config = transformers.LlamaConfig.from_pretrained(tmp_path)
    assert config.rope_parameters == entries
    # transformers before 5 reads these.
    content = json.loads((tmp_path / "config.json").read_text())
    assert (content["rope_scaling"] | {"rope_theta": content["rope_theta"]}) == entries
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert largest_difference(model, theirs) < 1e-5


def test_llama_3_1_as_it_is_on_the_hub_starts_an_own_decoder_at_a_longer_context(tmp_path) -> None:
    theirs = their_llama(
        tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    )
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    entries = content.pop("rope_parameters")
    path.write_text(
        json.dumps({**content, "rope_theta": entries.pop("rope_theta"), "rope_scaling": entries})
    )
    assert largest_difference(read_by_us(tmp_path), theirs) < 1e-5
    settings = compose_settings(
        ["recipe=gpt2", "model=llama", "context=1024", "model.rope_factor=16"]
    )
    config, _ = weights_at_context(str(tmp_path), settings.model, 1024)
    assert (config.context, config.rope) == (1024, RopeScaling("llama3", 16.0, 64))


def test_weights_without_scaling_get_yarn_from_their_own_context(tmp_path) -> None:
    their_llama(tmp_path)
    settings = compose_settings(
        ["recipe=gpt2", "model=llama", "context=2048", "model.rope=yarn", "model.rope_factor=4"]
    )
    config, _ = weights_at_context(str(tmp_path), settings.model, 2048)
    assert config.rope == RopeScaling("yarn", 4.0, 512)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "ntk", "linear", "yarn"])
def test_scalings_of_transformers_classes_alone_and_ones_without_a_factor_are_refused(
    kind, tmp_path
) -> None:
    their_llama(tmp_path)
    path = tmp_path / "config.json"
    changed = {
        **json.loads(path.read_text()),
        "rope_parameters": {"rope_type": kind, "rope_theta": 1e4},
    }
    path.write_text(json.dumps(changed))
    with pytest.raises(UserError, match=rf"{tmp_path}.*rope_type={kind}: expected .*recipe=hf"):
        load_decoder(tmp_path)
