"""transformers models with attention of their own are refused in a line; those that ask the interface are not."""

from __future__ import annotations

import copy
import pickle
import sys
import types

import huggingface_models
import pytest
import torch
import transformers
from torch import nn

from flashtrain.errors import UserError
from flashtrain.integrations import register_with_transformers
from flashtrain.integrations.huggingface_architectures import own_attention
from flashtrain.integrations.huggingface_masks import AttentionMask

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def bloom() -> transformers.BloomConfig:
    return transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4)


def falcon() -> transformers.FalconConfig:
    return transformers.FalconConfig(**SIZES)


# As transformers 5.23 was found to be when tiny models of every decoder architecture were run.
ASK_NOBODY = (
    "BloomForCausalLM", "CodeGenForCausalLM", "FalconForCausalLM", "GPTJForCausalLM", "GPTNeoForCausalLM",
    "MptForCausalLM", "OpenAIGPTLMHeadModel", "RoFormerForCausalLM", "XGLMForCausalLM", "XLNetLMHeadModel",
    "GitForCausalLM", "DebertaV2ForMaskedLM", "LongformerForMaskedLM",
)  # fmt: skip
ASK = (
    "GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "MistralForCausalLM",
    "GPTNeoXForCausalLM", "OPTForCausalLM", "GptOssForCausalLM", "BertForMaskedLM", "ModernBertForMaskedLM",
    "T5ForConditionalGeneration", "BartForConditionalGeneration", "LlamaForSequenceClassification", "MambaForCausalLM",
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name", "possible"),
    [
        (bloom, "BloomForCausalLM", "'eager'"),
        (falcon, "FalconForCausalLM", "'sdpa' or 'eager'"),
    ],
)
def test_a_model_with_attention_of_its_own_is_refused_when_it_is_built(config, name, possible):
    with pytest.raises(UserError, match=f"{name} .* does not ask transformers .*attn_implementation={possible} "):
        transformers.AutoModelForCausalLM.from_config(config(), attn_implementation=register_with_transformers())


def test_a_model_with_attention_of_its_own_cannot_be_switched_to_ours():
    name = register_with_transformers()
    model = transformers.BloomForCausalLM(bloom())
    for asked in (name, {"": name}):
        with pytest.raises(UserError, match="BloomForCausalLM computes its attention itself"):
            model.set_attn_implementation(asked)


def test_such_a_model_within_another_is_refused_too():
    name = register_with_transformers()
    parts = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        huggingface_models.bert(), transformers.RoFormerConfig(**SIZES)
    )
    model = transformers.EncoderDecoderModel(parts)
    with pytest.raises(UserError, match="RoFormer"):
        model.set_attn_implementation(name)
    model.set_attn_implementation({"encoder": name})
    assert model.encoder.config._attn_implementation == name


def test_other_implementations_are_chosen_as_before():
    register_with_transformers()
    assert transformers.BloomForCausalLM(bloom()).config._attn_implementation == "eager"
    model = transformers.AutoModelForCausalLM.from_config(falcon(), attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    assert model(torch.ones(1, 3, dtype=torch.long)).logits.shape == (1, 3, 61)


@pytest.mark.parametrize("name", ASK_NOBODY)
def test_architectures_that_ask_nobody_are_known_by_their_source(name):
    assert own_attention(getattr(transformers, name)) is not None


@pytest.mark.parametrize("name", ASK)
def test_architectures_that_ask_are_known_by_their_source(name):
    assert own_attention(getattr(transformers, name)) is None


OWN = """
from torch import nn
from transformers import {imported}

class OneAttention(nn.Module):
    pass

class Model({base}):
    config_class = None
"""


@pytest.mark.parametrize(
    ("imported", "base", "refused"),
    [
        ("PreTrainedModel", "PreTrainedModel", True),
        ("LlamaForCausalLM", "LlamaForCausalLM", False),
        ("PreTrainedModel, LlamaModel", "PreTrainedModel", False),
        ("PreTrainedModel, AutoModelForCausalLM", "PreTrainedModel", False),
    ],
)
def test_a_users_own_model_is_judged_by_its_source_and_those_that_it_holds_by_theirs(
    tmp_path, monkeypatch, imported, base, refused
):
    name = "own_transformers_model"
    (tmp_path / f"{name}.py").write_text(OWN.format(imported=imported, base=base))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = __import__(name)
    monkeypatch.setitem(sys.modules, name, module)
    assert (own_attention(module.Model) is not None) == refused


def test_a_model_without_source_is_not_refused():
    kind = types.new_class("Typed", (transformers.PreTrainedModel,))
    kind.__module__ = "a notebook"
    assert own_attention(kind) is None


MASK = AttentionMask(1, 2, 3)


@pytest.mark.parametrize(
    "use",
    [
        lambda mask: torch.ones(1) + mask,
        lambda mask: mask + torch.ones(1),
        lambda mask: 1.0 - mask,
        lambda mask: mask * 2,
        lambda mask: ~mask,
        lambda mask: mask[:, :, :, :2],
        lambda mask: mask.to(torch.float32),
        lambda mask: mask.dtype,
        lambda mask: nn.functional.pad(mask, (0, 1)),
        lambda mask: torch.ones(1).masked_fill(mask, 0.0),
    ],
)
def test_a_model_that_computes_with_its_mask_is_told_so_in_a_line(use):
    with pytest.raises(UserError, match=r"the model computes with its attention mask .*'sdpa' or 'eager'"):
        use(MASK)


def test_a_mask_is_still_a_tuple_that_can_be_copied():
    assert MASK[:3] == (1, 2, 3)
    assert MASK[1] == 2
    assert copy.deepcopy(MASK) == pickle.loads(pickle.dumps(MASK)) == MASK
    assert not hasattr(MASK, "dtype")


def test_a_model_that_reads_its_mask_is_told_so_in_a_line():
    """Doge and DeepSeek 3.2 choose keys by the mask: they ask the interface, and yet cannot be served."""
    config = transformers.DogeConfig(**SIZES, intermediate_size=48)
    model = transformers.DogeForCausalLM._from_config(config, attn_implementation=register_with_transformers())
    with pytest.raises(UserError, match="the model computes with its attention mask"):
        model(torch.ones(2, 5, dtype=torch.long))
