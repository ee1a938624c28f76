"""Fine-tuned classifiers of ours in transformers: the same logits, the labels' names,
and what it cannot hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashtrain.errors import UserError
from flashtrain.integrations import load_bert, save_bert_classifier
from flashtrain.models import Bert, BertConfig, BertEncoder, SequenceClassifier, TokenClassifier

transformers = pytest.importorskip("transformers")
NAMES = ("no", "yes", "perhaps")


def encoder(family: str = "bert", activation: str | None = None) -> BertEncoder:
    config = BertConfig.of_size("tiny", family, vocab_size=50, context=24, activation=activation)
    torch.manual_seed(0)
    small = BertEncoder(
        replace(config, embed=32, ffn=64, layers=2, masked_head=False), "sdpa"
    ).double()
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # norms and biases other than 1 and 0
    return small


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 50, (4, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("activation", ["gelu", "gelu_exact"])
@pytest.mark.parametrize("several", [False, True])
def test_a_classifier_of_texts_has_transformers_logits(
    tmp_path, tokens, several, activation
) -> None:
    model = (
        SequenceClassifier(encoder(activation=activation), 3, multi_label=several, pooling="first")
        .double()
        .eval()
    )
    save_bert_classifier(model, tmp_path, NAMES, pad_token=46)
    kind = transformers.BertForSequenceClassification
    theirs, told = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.config.id2label == dict(enumerate(NAMES))
    assert theirs.config.problem_type.startswith("multi" if several else "single")
    lengths = torch.tensor([24, 7, 13, 1])
    mask = (torch.arange(24) < lengths[:, None]).long()
    found = theirs.double().eval()(tokens, attention_mask=mask).logits
    torch.testing.assert_close(model(tokens, lengths=lengths), found, atol=1e-10, rtol=1e-10)


def test_so_has_a_classifier_of_words(tmp_path, tokens) -> None:
    model = TokenClassifier(encoder(), 3).double().eval()
    save_bert_classifier(model, tmp_path, NAMES)
    theirs, told = transformers.BertForTokenClassification.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(
        model(tokens), theirs.double().eval()(tokens).logits, atol=1e-10, rtol=1e-10
    )


def test_its_encoder_and_pooler_are_read_back_for_another_head(tmp_path) -> None:
    model = SequenceClassifier(encoder(), 3, pooling="first").double()
    save_bert_classifier(model, tmp_path, NAMES)
    config, state = load_bert(tmp_path)
    again = Bert(config, "sdpa").double()
    again.load_state_dict(state)
    assert again.pooler is not None
    assert torch.equal(again.pooler.dense.weight, model.pooler.dense.weight)
    assert torch.equal(
        again.encoder.blocks[1].attention.qkv.weight, model.encoder.blocks[1].attention.qkv.weight
    )


@pytest.mark.parametrize(
    ("family", "pooling", "message"),
    [("bert", "max", "pooling=max"), ("modern", "first", "norm_place=pre, positions=rotary")],
)
def test_what_transformers_cannot_hold_is_refused(tmp_path, family, pooling, message) -> None:
    with pytest.raises(UserError, match=message):
        save_bert_classifier(
            SequenceClassifier(encoder(family), 3, pooling=pooling), tmp_path / "x", NAMES
        )
    assert not (tmp_path / "x").exists()
