"""transformers models with attention of their own are refused in a line; those that ask
the interface are not."""

from __future__ import annotations

import huggingface_models
import pytest
import torch
import transformers
from torch import nn

from flashtrain.errors import UserError
from flashtrain.integrations import register_with_transformers
from flashtrain.integrations.huggingface_architectures import attention_calls, check_architecture
from flashtrain.integrations.huggingface_masks import AttentionMask
from flashtrain.integrations.huggingface_model import transformers_decoder

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def bloom() -> transformers.BloomConfig:
    return transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4)


def falcon() -> transformers.FalconConfig:
    return transformers.FalconConfig(**SIZES)


@pytest.mark.parametrize("config", [bloom, falcon])
def test_a_model_with_attention_of_its_own_is_refused_when_it_is_built(config):
    with pytest.raises(
        UserError, match=r"(Bloom|Falcon)ForCausalLM .* 0 times .*attn_implementation='eager'"
    ):
        transformers.AutoModelForCausalLM.from_config(
            config(), attn_implementation=register_with_transformers()
        )


def test_a_model_with_attention_of_its_own_stays_on_it_or_is_refused_when_it_is_set_to_ours():
    name = register_with_transformers()
    model = transformers.BloomForCausalLM(bloom())
    model.set_attn_implementation(name)  # transformers warns
    assert model.config._attn_implementation == "eager"
    git = transformers.GitForCausalLM(transformers.GitConfig(**SIZES, intermediate_size=48))
    with pytest.raises(UserError, match=r"GitForCausalLM .* 0 times"):
        git.set_attn_implementation(name)


def test_such_a_model_within_another_is_refused_too():
    name = register_with_transformers()
    parts = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        huggingface_models.KINDS["bert"](), transformers.RoFormerConfig(**SIZES)
    )
    model = transformers.EncoderDecoderModel(parts)
    model.set_attn_implementation(name)
    assert model.encoder.config._attn_implementation == name
    assert model.decoder.config._attn_implementation == "eager"
    parts._attn_implementation = name
    with pytest.raises(UserError, match="RoFormer"):
        transformers.EncoderDecoderModel(parts)


def test_other_implementations_are_chosen_as_before():
    register_with_transformers()
    model = transformers.AutoModelForCausalLM.from_config(falcon(), attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    assert model(torch.ones(1, 3, dtype=torch.long)).logits.shape == (1, 3, 61)


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        *((name, 0) for name in ("Bloom", "Falcon", "Git", "Mpt", "RoFormer")),
        *(
            (name, 2)
            for name in ("BioGpt", "GPTNeoX", "GptOss", "Llama", "OPT", "Phi", "Qwen3", "StableLm")
        ),
        ("Starcoder2", 2),
        ("Mixtral", 2),
        ("DiffLlama", 4),
        ("MiniMax", 1),  # and a layer of linear attention
        ("Mamba", None),
    ],
)
def test_a_forward_of_a_model_without_weights_counts_its_calls(name, calls):
    register_with_transformers()
    kind = getattr(transformers, f"{name}ForCausalLM")
    assert attention_calls(kind, kind.config_class(num_hidden_layers=2))[0] == calls


@pytest.mark.parametrize("kind", [transformers.CodeGenForCausalLM, transformers.GPTJForCausalLM])
def test_a_model_is_served_from_the_release_on_in_which_it_uses_the_registered_attention(kind):
    """transformers 5.24 for these two."""
    register_with_transformers()
    expected = 2 if kind._supports_attention_backend else 0
    assert attention_calls(kind, kind.config_class(num_hidden_layers=2))[0] == expected


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("XLNetLMHeadModel", 0),
        ("LongformerForMaskedLM", 0),
        ("WhisperForConditionalGeneration", None),  # it wants sounds
        ("BartForConditionalGeneration", 6),
    ],
)
def test_transformers_says_whether_a_model_that_cannot_be_counted_takes_our_attention(name, calls):
    register_with_transformers()
    kind = getattr(transformers, name)
    layers = (
        {"encoder_layers": 2, "decoder_layers": 2}
        if name.startswith("Bart")
        else {"num_hidden_layers": 2}
    )
    assert attention_calls(kind, kind.config_class(**layers))[0] == calls


LATENT = {
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
}
INDEXED = {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        *(
            (kind, INDEXED, "computes with its attention masks")
            for kind in ("deepseek_v32", "glm_moe_dsa", "axk2")
        ),
        ("hy_v4", {**INDEXED, "head_dim": 8}, "computes with its attention masks"),
        ("doge", {}, "computes with its attention masks"),
        ("llama", {"head_dim": 520}, "has heads of 520"),
        ("mimo_v2_flash", {"head_dim": 8, "v_head_dim": 16}, "has values wider than its queries"),
    ],
)
def test_what_our_attention_does_not_compute_is_refused_and_trained_with_transformers_own(
    kind, changes, reason
):
    config = {**huggingface_models.LLAMA_LIKE, **changes}
    with pytest.raises(UserError, match=rf"{kind}: \w+ForCausalLM {reason}.* attention=standard"):
        transformers_decoder(config=kind, changes=config)
    transformers_decoder(config=kind, changes=config, attention="standard")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        *(
            (kind, "takes no position_ids")
            for kind in ("bart", "marian", "pegasus", "plbart", "whisper")
        ),
        ("xmod", "fails in a forward: Input language unknown"),
    ],
)
@pytest.mark.parametrize("attention", ["flash", "standard"])
def test_a_decoder_whose_packed_documents_would_be_read_as_one_or_that_fails_is_refused(
    kind, reason, attention
):
    with pytest.raises(UserError, match=reason):
        transformers_decoder(config=kind, attention=attention)


@pytest.mark.parametrize("attention", ["flash", "standard"])
@pytest.mark.parametrize("kind", ["bert", "electra", "xlm-roberta"])
def test_a_model_whose_tokens_see_what_they_predict_is_refused_until_it_is_a_decoder(
    kind, attention
):
    sizes = {**SIZES, "intermediate_size": 48}
    with pytest.raises(UserError, match=rf"{kind}: .* see the later .*is_decoder: true"):
        transformers_decoder(config=kind, changes=sizes, attention=attention)
    transformers_decoder(config=kind, changes={**sizes, "is_decoder": True}, attention=attention)


@pytest.mark.parametrize(
    ("kind", "said"),
    [("gemma", True), ("gemma2", True), ("gemma3_text", True), ("gemma4_text", "all")],
)
def test_a_bidirectional_gemma_is_told_the_entry_that_makes_it_causal(kind, said):
    sizes = {**huggingface_models.LLAMA_LIKE, "head_dim": 8}
    with pytest.raises(UserError, match=r"\{use_bidirectional_attention: null\}\.$"):
        transformers_decoder(config=kind, changes={**sizes, "use_bidirectional_attention": said})
    transformers_decoder(config=kind, changes={**sizes, "use_bidirectional_attention": None})


def test_no_entry_is_named_to_a_model_whose_configuration_has_none():
    model = huggingface_models.build("llama", "eager")
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(UserError, match=r"expected a decoder\.$"):
        check_architecture(model, model.model.layers, "mine")


class Judge(transformers.PreTrainedModel):
    """A user's own: a Llama, and attention of its own on top, or that alone."""

    config_class = transformers.LlamaConfig

    def __init__(self, config, llama=True):
        super().__init__(config)
        self.body = transformers.LlamaModel(config) if llama else nn.Embedding(61, 32)
        self.top = OwnAttention(32, 4)
        self.post_init()

    def forward(self, input_ids, **_):
        states = self.body(input_ids)
        states = getattr(states, "last_hidden_state", states)
        return self.top(states, states, states)[0]


class OwnAttention(nn.MultiheadAttention):
    pass


class Alone(Judge):
    def __init__(self, config):
        super().__init__(config, llama=False)


def test_a_users_own_model_is_judged_by_what_it_calls():
    name = register_with_transformers()
    config = huggingface_models.KINDS["llama"]()
    Judge._from_config(config, attn_implementation=name)(torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(UserError, match=r"Alone calls .* 0 times"):
        Alone._from_config(config, attn_implementation=name)


def test_a_model_that_computes_with_its_mask_fails_and_gives_no_wrong_result():
    """Doge and DeepSeek 3.2 choose keys by the mask: they call the interface,
    and yet cannot be served."""
    config = transformers.DogeConfig(**SIZES, intermediate_size=48)
    model = transformers.DogeForCausalLM._from_config(
        config, attn_implementation=register_with_transformers()
    )
    with pytest.raises((TypeError, AttributeError, UserError)):
        model(torch.ones(2, 5, dtype=torch.long))
    mask = AttentionMask(1, 2, 3)
    for use in (
        lambda: mask + torch.ones(1),
        lambda: 1.0 - mask,
        lambda: mask[:, :, :, :2],
        lambda: mask.to("cpu"),
    ):
        with pytest.raises((TypeError, AttributeError)):
            use()
