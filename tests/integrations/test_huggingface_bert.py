"""BERT weights to and from transformers, compared with transformers itself."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from flashtrain.errors import UserError
from flashtrain.integrations import load_bert, save_bert
from flashtrain.models.bert import Bert
from flashtrain.models.bert_config import BertConfig

GENERATOR = torch.Generator().manual_seed(1)
TOKENS = torch.randint(0, 61, (3, 16), generator=GENERATOR)
SEGMENTS = torch.randint(0, 2, (3, 16), generator=GENERATOR)
LENGTHS = torch.tensor([16, 5, 11])
VISIBLE = torch.arange(16) < LENGTHS[:, None]


def their_model(kind: str = "BertForPreTraining", **changes):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 61,
        "max_position_embeddings": 16,
        "hidden_size": 24,
        "num_hidden_layers": 2,
    }
    sizes |= {"num_attention_heads": 3, "intermediate_size": 40, "attn_implementation": "eager"}
    model = (
        getattr(transformers, kind)(transformers.BertConfig(**{**sizes, **changes})).double().eval()
    )
    # Biases and norms too: an untouched zero or one could hide a mix-up.
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def our_model(folder, attention: str = "sdpa") -> Bert:
    config, state_dict = load_bert(folder)
    model = Bert(config, attention).double()
    model.load_state_dict(state_dict)
    return model


def theirs_of(model):
    return model(TOKENS, attention_mask=VISIBLE.long(), token_type_ids=SEGMENTS)


@pytest.fixture
def folder(tmp_path):
    their_model().save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.mark.parametrize(
    ("attention", "activation"),
    [("flash", "gelu"), ("sdpa", "gelu"), ("sdpa", "gelu_new"), ("standard", "gelu")],
)
def test_imported_weights_give_transformers_logits(tmp_path, attention, activation):
    theirs = their_model(hidden_act=activation)
    theirs.save_pretrained(tmp_path)
    ours = our_model(tmp_path, attention)
    assert ours.config.vocab_rows == 64
    expected = theirs_of(theirs)
    hidden = ours.encoder(TOKENS, segments=SEGMENTS, lengths=LENGTHS)
    logits = ours.masked_head(hidden, ours.output_weight)
    assert (logits[..., :61] - expected.prediction_logits)[VISIBLE].abs().max() < 1e-10
    assert torch.isneginf(logits[..., 61:]).all()
    assert (
        ours.next_sentence_logits(hidden) - expected.seq_relationship_logits
    ).abs().max() < 1e-10


def test_a_masked_language_model_and_a_bare_encoder_are_read_with_the_heads_that_they_have(
    tmp_path,
):
    masked, bare = their_model("BertForMaskedLM"), their_model("BertModel")
    masked.save_pretrained(tmp_path / "masked")
    bare.save_pretrained(tmp_path / "bare")
    ours = our_model(tmp_path / "masked")
    assert (ours.config.masked_head, ours.config.pooler, ours.config.next_sentence) == (
        True,
        False,
        False,
    )
    logits = ours(TOKENS, segments=SEGMENTS, lengths=LENGTHS)
    assert (logits[..., :61] - theirs_of(masked).logits)[VISIBLE].abs().max() < 1e-10
    ours = our_model(tmp_path / "bare")
    assert (ours.config.masked_head, ours.config.pooler, ours.config.next_sentence) == (
        False,
        True,
        False,
    )
    hidden = ours.encoder(TOKENS, segments=SEGMENTS, lengths=LENGTHS)
    assert (hidden - theirs_of(bare).last_hidden_state)[VISIBLE].abs().max() < 1e-10
    assert (ours.pooled(hidden) - theirs_of(bare).pooler_output).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("kind", "activation", "heads"),
    [
        ("BertForPreTraining", "gelu", {"pooler": True, "next_sentence": True}),
        ("BertForMaskedLM", "gelu_exact", {}),
        ("BertModel", "gelu", {"masked_head": False, "pooler": True}),
    ],
)
def test_exported_weights_give_the_same_in_transformers(tmp_path, kind, activation, heads):
    torch.manual_seed(0)
    config = BertConfig.of_size("tiny", vocab_size=61, context=16, activation=activation)
    model = Bert(replace(config, ffn=200, **heads), "sdpa").double()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    save_bert(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [kind]
    options = {"dtype": torch.float64, "output_loading_info": True}
    theirs, told = getattr(transformers, kind).from_pretrained(tmp_path, **options)
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    hidden, output = (
        model.encoder(TOKENS, segments=SEGMENTS, lengths=LENGTHS),
        theirs_of(theirs.eval()),
    )
    if kind == "BertModel":
        found, expected = hidden, output.last_hidden_state
    else:
        expected = output.prediction_logits if kind == "BertForPreTraining" else output.logits
        found = model.masked_head(hidden, model.output_weight)[..., :61]
    assert (found - expected)[VISIBLE].abs().max() < 1e-10


def test_the_names_of_2018_and_copies_of_tied_tensors_are_read(folder):
    expected = our_model(folder).state_dict()
    tensors = load_file(folder / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    old["cls.predictions.decoder.weight"] = tensors[
        "bert.embeddings.word_embeddings.weight"
    ].clone()
    old["bert.embeddings.position_ids"] = torch.arange(16)[None]
    save_file(old, folder / "model.safetensors")
    found = our_model(folder).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "roberta"}, "model_type roberta"),
        ({"hidden_act": "relu"}, "hidden_act=relu"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type=relative_key"),
        ({"is_decoder": True}, "is_decoder=True"),
        ({"num_hidden_layers": 1}, "'encoder.layer.1"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(folder, changes, message):
    change_config(folder, **changes)
    with pytest.raises(UserError, match=message):
        load_bert(folder)


def test_a_decoder_that_is_not_tied_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["cls.predictions.decoder.weight"] = (
        tensors["bert.embeddings.word_embeddings.weight"] + 1
    )
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"decoder.weight' differs"):
        load_bert(folder)


@pytest.mark.parametrize(("family", "changes"), [("modern", {}), ("bert", {"pooler": True})])
def test_a_model_that_transformers_cannot_hold_is_written_in_our_own_layout(
    tmp_path, family, changes
):
    config = replace(BertConfig.of_size("tiny", family, vocab_size=61, context=16), **changes)
    assert "flashtrain's own format" in save_bert(Bert(config, "sdpa"), tmp_path)
    assert load_bert(tmp_path)[0] == config
