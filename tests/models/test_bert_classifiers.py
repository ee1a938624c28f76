"""Classification heads: the same on padded and packed sequences; what is no
label counts nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from bert_batches import VOCABULARY, batch_of

from flashtrain.models import Bert, BertConfig, BertEncoder, SequenceClassifier, TokenClassifier

LENGTHS = [5, 1, 9, 3]
PADDED, PACKED = (
    {name: x for name, x in layout.items() if name not in ("masked", "labels")}
    for layout in batch_of(LENGTHS)
)
MANY = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]])
SPARE = len(PACKED["cu_seqlens"]) - 1 - len(LENGTHS)


def build(kind=SequenceClassifier, **options):
    torch.manual_seed(0)
    encoder = BertEncoder(BertConfig.of_size("tiny", vocab_size=VOCABULARY, context=16), "sdpa")
    return kind(encoder, 3, **options).double()


@pytest.mark.parametrize("pooling", ["first", "mean", "max", "probe"])
def test_one_class_each_is_scored_by_cross_entropy(pooling):
    model = build(pooling=pooling)
    classes = torch.tensor([2, 0, 1, 2])
    exact = F.cross_entropy(model(**PADDED), classes)
    assert model.loss(labels=classes, **PADDED).item() == pytest.approx(exact.item(), abs=1e-10)
    spare = torch.cat((classes, torch.full((SPARE,), -100)))
    assert model.loss(labels=spare, **PACKED).item() == pytest.approx(exact.item(), abs=1e-10)


def test_several_labels_each_are_scored_by_binary_cross_entropy():
    model = build(multi_label=True)
    exact = F.binary_cross_entropy_with_logits(model(**PADDED), MANY.double())
    assert model.loss(labels=MANY, **PADDED).item() == pytest.approx(exact.item(), abs=1e-10)
    spare = torch.cat((MANY, torch.full((SPARE, 3), -100)))
    assert model.loss(labels=spare, **PACKED).item() == pytest.approx(exact.item(), abs=1e-10)


def test_token_labels_count_where_they_are_not_ignored():
    model = build(TokenClassifier)
    real = torch.arange(9) < PADDED["lengths"][:, None]
    classes = torch.randint(0, 3, (4, 9), generator=torch.Generator().manual_seed(0))
    exact = F.cross_entropy(model(**PADDED)[real], classes[real])
    assert model.loss(labels=classes.where(real, -100), **PADDED).item() == pytest.approx(
        exact.item(), abs=1e-10
    )
    spare = torch.cat((classes[real], torch.full((len(PACKED["tokens"]) - sum(LENGTHS),), -100)))
    assert model.loss(labels=spare, **PACKED).item() == pytest.approx(exact.item(), abs=1e-10)


def test_a_batch_without_labels_has_loss_zero():
    assert build().loss(labels=torch.full((4,), -100), **PADDED) == 0
    assert build(multi_label=True).loss(labels=torch.full((4, 3), -100), **PADDED) == 0


def test_a_trained_pooler_is_kept_and_a_trained_encoder_left_alone():
    bert = Bert(replace(BertConfig.of_size("tiny", vocab_size=VOCABULARY), pooler=True), "sdpa")
    before = bert.encoder.token_embedding.weight.clone()
    model = SequenceClassifier(bert.encoder, 2, pooler=bert.pooler)
    assert model.pooler is bert.pooler
    assert torch.equal(model.encoder.token_embedding.weight, before)
