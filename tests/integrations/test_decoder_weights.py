"""Our decoders in transformers' layouts (GPT-2, Llama, Starcoder2), both ways,
against transformers itself."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.llama import modeling_llama
from transformers.models.starcoder2 import modeling_starcoder2

from flashtrain.errors import UserError
from flashtrain.integrations import load_decoder, save_decoder
from flashtrain.models import Decoder, DecoderConfig

TOKENS = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(1))
KINDS = {
    "llama": {},
    "untied": {"tie_embeddings": False},
    "biased": {"bias": True},
    "longer": {"rope_base": 500.0, "rope_factor": 4.0},
    "all heads": {"kv_heads": 4},
}


@pytest.fixture(autouse=True)
def float64(monkeypatch) -> None:
    """transformers computes norms and angles in float32 whatever the model's type: here exactly."""

    def norm(self, x):
        return self.weight * (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        )

    def angles(self, x, position_ids):
        size = self.config.head_dim if hasattr(self.config, "head_dim") else None
        size = size or self.config.hidden_size // self.config.num_attention_heads
        exponent = torch.arange(0, size, 2, dtype=torch.float64) / size
        turned = (
            position_ids[..., None].double()
            * self.config.rope_parameters["rope_theta"] ** -exponent
        )
        return torch.cat((turned, turned), dim=-1).cos().to(x), torch.cat(
            (turned, turned), dim=-1
        ).sin().to(x)

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", angles)
    monkeypatch.setattr(modeling_starcoder2.Starcoder2RotaryEmbedding, "forward", angles)


def make(family: str = "llama", positions: str = "rotary", **changes) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig.of_size("demo", family, vocab_size=61, context=16, positions=positions)
    model = Decoder(config.changed(**changes), attention="sdpa").double().eval()
    # Biases and norms too: an untouched zero or one could hide a mix-up.
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def read_by_transformers(folder):
    options = {"dtype": torch.float64, "attn_implementation": "sdpa", "output_loading_info": True}
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not any(found[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def read_by_us(folder, attention: str = "sdpa") -> Decoder:
    config, state = load_decoder(folder)
    model = Decoder(config, attention=attention).double().eval()
    model.load_state_dict(state)
    return model


ROTARY_GPT2 = [("gpt2", kind, "Starcoder2ForCausalLM") for kind in ("llama", "untied", "longer")]
LEARNED = {"positions": "learned", "ffn": 200}
KINDS |= {"learned": LEARNED, "learned, untied": {**LEARNED, "tie_embeddings": False}}
GPT_2 = [("gpt2", kind, "GPT2LMHeadModel") for kind in ("learned", "learned, untied")]
LLAMA = [
    ("llama", kind, "LlamaForCausalLM")
    for kind in ("llama", "untied", "biased", "longer", "all heads")
]


@pytest.mark.parametrize(("family", "kind", "layout"), [*LLAMA, *ROTARY_GPT2, *GPT_2])
def test_an_exported_model_has_the_same_logits_in_transformers(
    tmp_path, family, kind, layout
) -> None:
    model = make(family, **KINDS[kind])
    assert "AutoModelForCausalLM.from_pretrained reads it" in save_decoder(
        model, tmp_path, end_of_text=60
    )
    theirs = read_by_transformers(tmp_path)
    assert type(theirs).__name__ == layout
    assert (
        theirs.config.vocab_size,
        theirs.config.eos_token_id,
        theirs.generation_config.eos_token_id,
    ) == (61, 60, 60)
    assert (theirs(TOKENS).logits - model(TOKENS)[..., :61]).abs().max().item() < 1e-10
    assert torch.equal(read_by_us(tmp_path)(TOKENS), model(TOKENS))


@pytest.mark.parametrize(("attention_bias", "tied"), [(False, True), (True, False)])
def test_transformers_own_llama_comes_in_and_goes_out_as_it_was(
    tmp_path, attention_bias, tied
) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 777.0,
        "rope_type": "default"}, attention_bias=attention_bias, mlp_bias=attention_bias,
        tie_word_embeddings=tied,
        bos_token_id=1, eos_token_id=60,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).double().eval()
    for parameter in theirs.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = read_by_us(tmp_path / "theirs")
    assert (ours.config.rope_base, ours.config.vocab_rows) == (777.0, 64)
    assert (ours(TOKENS)[..., :61] - theirs(TOKENS).logits).abs().max().item() < 1e-10
    save_decoder(ours, tmp_path / "ours", end_of_text=60)
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_large_weights_are_several_files_which_both_read(tmp_path, monkeypatch) -> None:
    model = make()
    with monkeypatch.context() as patch:
        patch.setattr("flashtrain.integrations.weight_files.SHARD_BYTES", 10**6)
        save_decoder(model, tmp_path)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert all(shard.stat().st_size < 1.1 * 10**6 for shard in shards)
    assert not (tmp_path / "model.safetensors").exists()
    assert (
        read_by_transformers(tmp_path)(TOKENS).logits - model(TOKENS)[..., :61]
    ).abs().max().item() < 1e-10
    assert torch.equal(read_by_us(tmp_path)(TOKENS), model(TOKENS))
    # One file again: nothing of the shards is left to be read instead.
    save_decoder(model, tmp_path)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
    assert torch.equal(read_by_us(tmp_path)(TOKENS), model(TOKENS))


def test_what_no_layout_of_transformers_holds_is_written_in_our_own(tmp_path) -> None:
    model = Decoder(make().config.changed(positions="learned"), attention="sdpa")
    assert "flashtrain's own format" in save_decoder(model, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type mamba: expected gpt2, llama, starcoder2"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type=llama3"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_scaling="),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"head_dim": 16}, "head_dim=16"),
        ({"mlp_bias": True}, "attention_bias and mlp_bias"),
        ({"num_hidden_layers": 5}, "'layers.4.input_layernorm.weight' has the shape None"),
    ],
)
def test_a_llama_that_does_not_fit_is_refused(tmp_path, changes, message) -> None:
    save_decoder(make(), tmp_path)
    assert_refused(tmp_path, changes, message)


def assert_refused(folder, changes, message) -> None:
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(
        json.dumps({name: value for name, value in content.items() if value is not None})
    )
    with pytest.raises(UserError, match=message):
        load_decoder(folder)


# GPT-2


def their_gpt2(**changes) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3}
    config = transformers.GPT2Config(
        **{
            **sizes,
            "bos_token_id": 60,
            "eos_token_id": 60,
            "attn_implementation": "eager",
            **changes,
        }
    )
    model = transformers.GPT2LMHeadModel(config).double().eval()
    # Biases and norms too: an untouched zero or one could hide a mix-up.
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture
def folder(tmp_path):
    their_gpt2().save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


@pytest.mark.parametrize(("attention", "tied"), [("sdpa", True), ("standard", False)])
def test_imported_weights_give_transformers_logits(tmp_path, attention, tied):
    theirs = their_gpt2(tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path)
    ours = read_by_us(tmp_path, attention)
    assert ours.config.vocab_rows == 64
    assert (ours(TOKENS)[..., :61] - theirs(TOKENS).logits).abs().max().item() < 1e-10


def test_a_bare_model_one_file_and_shards_with_their_index_are_read(folder, tmp_path):
    wanted = read_by_us(folder)(TOKENS)
    their_gpt2().transformer.save_pretrained(tmp_path / "bare")
    assert "wte.weight" in load_file(tmp_path / "bare" / "model.safetensors")
    their_gpt2().save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    for given in (tmp_path / "bare", folder / "model.safetensors", tmp_path / "shards"):
        assert torch.equal(read_by_us(given)(TOKENS), wanted)
    next((tmp_path / "shards").glob("model-00002*")).unlink()
    with pytest.raises(UserError, match=r"no model-00002"):
        load_decoder(tmp_path / "shards")


def test_old_mask_buffers_and_a_doubled_head_are_passed_over(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    read_by_us(folder)


def test_the_embedding_gets_the_rows_asked_for(folder):
    config, state_dict = load_decoder(folder, vocab_rows=61)
    assert config.vocab_rows == 61
    config, state_dict = load_decoder(folder, vocab_rows=128)
    assert state_dict["token_embedding.weight"].shape == (128, 24)
    assert not state_dict["token_embedding.weight"][61:].any()


def test_a_missing_folder_or_file_is_named(folder, tmp_path):
    with pytest.raises(UserError, match=r"no weights at .*/nowhere"):
        load_decoder(tmp_path / "nowhere")
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
        with pytest.raises((UserError, FileNotFoundError), match=name):
            load_decoder(folder)


def test_a_file_that_is_cut_off_or_no_safetensors_is_named(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors is not a complete"):
        load_decoder(folder)
    with pytest.raises(UserError, match=r"config.json is not a safetensors file"):
        load_decoder(folder / "config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "relu"}, "activation_function=relu"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06"),
        ({"n_positions": 32}, r"'wpe.weight' has the shape \(16, 24\)"),
        ({"n_layer": 3}, "'h.2.ln_1.weight' has the shape None"),
        ({"n_layer": 1}, "'h.1.* expects None"),
    ],
)
def test_a_gpt2_that_does_not_fit_is_refused(folder, changes, message):
    assert_refused(folder, changes, message)
