"""GPT-2 weights to and from transformers, compared with transformers itself."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from flashtrain.errors import UserError
from flashtrain.integrations import load_gpt2, save_gpt2
from flashtrain.models import GPT2, GPT2Config

TOKENS = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(1))


def their_model(**changes) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3}
    config = transformers.GPT2Config(
        **{**sizes, "bos_token_id": 60, "eos_token_id": 60, "attn_implementation": "eager", **changes}
    )
    model = transformers.GPT2LMHeadModel(config).double().eval()
    for parameter in model.parameters():  # biases and norms too: an untouched zero or one could hide a mix-up
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def our_model(folder, attention: str = "sdpa") -> GPT2:
    config, state_dict = load_gpt2(folder)
    model = GPT2(config, attention=attention).double()
    model.load_state_dict(state_dict)
    return model


@pytest.fixture
def folder(tmp_path):
    their_model().save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


@pytest.mark.parametrize(("attention", "tied"), [("sdpa", True), ("standard", False)])
def test_imported_weights_give_transformers_logits(tmp_path, attention, tied):
    theirs = their_model(tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path)
    ours = our_model(tmp_path, attention)
    assert ours.config.vocab_rows == 64
    assert (ours(TOKENS)[..., :61] - theirs(TOKENS).logits).abs().max().item() < 1e-10


def test_flash_gives_them_to_float32s_rounding(folder):
    theirs, ours = their_model(), our_model(folder, "flash").float()
    assert (ours(TOKENS)[..., :61] - theirs(TOKENS).logits).abs().max().item() < 1e-4


@pytest.mark.parametrize("tied", [True, False])
def test_exported_weights_give_the_same_logits_in_transformers(tmp_path, tied):
    torch.manual_seed(0)
    config = GPT2Config.of_size("demo", vocab_size=61, context=16)
    model = GPT2(replace(config, tie_embeddings=tied, ffn=200), attention="sdpa").double()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    save_gpt2(model, tmp_path / "out", end_of_text=60)
    kind, options = transformers.GPT2LMHeadModel, {"dtype": torch.float64, "output_loading_info": True}
    theirs, found = kind.from_pretrained(tmp_path / "out", **options)
    assert not any(found[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs.eval()
    assert theirs.config.vocab_size == 61
    assert theirs.config.eos_token_id == 60
    assert (theirs(TOKENS).logits - model(TOKENS)[..., :61]).abs().max().item() < 1e-10


def test_a_bare_model_one_file_and_shards_with_their_index_are_read(folder, tmp_path):
    wanted = our_model(folder)(TOKENS)
    their_model().transformer.save_pretrained(tmp_path / "bare")
    assert "wte.weight" in load_file(tmp_path / "bare" / "model.safetensors")
    their_model().save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    for given in (tmp_path / "bare", folder / "model.safetensors", tmp_path / "shards"):
        assert torch.equal(our_model(given)(TOKENS), wanted)
    next((tmp_path / "shards").glob("model-00002*")).unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002"):
        load_gpt2(tmp_path / "shards")


def test_old_mask_buffers_and_a_doubled_head_are_passed_over(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    our_model(folder)


def test_the_embedding_gets_the_rows_asked_for(folder):
    config, state_dict = load_gpt2(folder, vocab_rows=61)
    assert config.vocab_rows == 61
    config, state_dict = load_gpt2(folder, vocab_rows=128)
    assert state_dict["token_embedding.weight"].shape == (128, 24)
    assert not state_dict["token_embedding.weight"][61:].any()


# Mistakes


def change_config(folder, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_missing_folder_or_file_is_named(folder, tmp_path):
    with pytest.raises(UserError, match=r"no weights at .*/nowhere"):
        load_gpt2(tmp_path / "nowhere")
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
        with pytest.raises(UserError, match=f"no {name} in"):
            load_gpt2(folder)


def test_a_file_that_is_cut_off_or_no_safetensors_is_named(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"model.safetensors is no whole safetensors file"):
        load_gpt2(folder)
    with pytest.raises(UserError, match=r"config.json is not a safetensors file"):
        load_gpt2(folder / "config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type llama"),
        ({"activation_function": "relu"}, "activation_function=relu"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06"),
        ({"n_positions": 32}, r"'wpe.weight' of shape \(16, 24\)"),
        ({"n_layer": 3}, "has no tensor 'h.2.ln_1.weight'"),
        ({"n_layer": 1}, "has 12 tensors .* 'h.1"),
        ({"format": "flashtrain"}, "load_weights reads it"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(folder, changes, message):
    change_config(folder, **changes)
    with pytest.raises(UserError, match=message):
        load_gpt2(folder)


def test_the_modern_family_is_refused_on_export_and_told_what_is_possible(tmp_path):
    model = GPT2(GPT2Config.of_size("demo", "modern", vocab_size=61, context=16), attention="sdpa")
    with pytest.raises(UserError, match=r"positions=rotary, norm=rmsnorm.* Possible: save_weights"):
        save_gpt2(model, tmp_path)
    assert not list(tmp_path.iterdir())
