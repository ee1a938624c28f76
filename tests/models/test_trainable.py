"""A model of one's own: what it must have, what it may have, and any module
whose forward gives logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flashtrain.errors import UserError
from flashtrain.models import Decoder, DecoderConfig, MemorySavings, Trainable
from flashtrain.models.trainable import as_trainable, check_contract
from flashtrain.tasks import LanguageModel
from flashtrain_kernels import masks

VOCABULARY = 17


class Logits(nn.Module):
    """V logits of each token. B batch, S sequence, V vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


class WithPositions(Logits):
    def forward(self, tokens, positions=None, mask=None):
        return super().forward(tokens) + (0 if positions is None else positions[..., None])


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def loss(self, tokens, labels):
        return self.weight * labels.float().mean()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (2, 5))
    labels = torch.randint(VOCABULARY, (2, 5))
    labels[0, 0] = -100
    return tokens, labels


def test_logits_are_scored_by_their_cross_entropy_over_the_labels_that_count() -> None:
    module, (tokens, labels) = Logits(), batch()
    model = as_trainable(module)
    expected = F.cross_entropy(module(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(model.loss(tokens, labels), expected)
    assert model.parameter_count() == sum(one.numel() for one in module.parameters())
    assert model.flops_per_token(5) == 6 * model.parameter_count()
    assert model.shape is None
    assert not model.generates


def test_a_modules_own_loss_is_its_loss() -> None:
    tokens, labels = batch()
    torch.testing.assert_close(
        as_trainable(WithLoss()).loss(tokens, labels), 2 * labels.float().mean()
    )


def test_a_trainable_stays_itself_and_weights_keep_their_names() -> None:
    config = DecoderConfig.of_size("demo", vocab_size=VOCABULARY, context=8)
    model = Decoder(config)
    assert as_trainable(model) is model
    module = Logits()
    wrapped = as_trainable(module)
    assert set(wrapped.state_dict()) == set(module.state_dict())
    wrapped.load_state_dict(
        {name: torch.zeros_like(one) for name, one in module.state_dict().items()}
    )
    assert not any(one.any() for one in module.parameters())
    assert set(LanguageModel(module).state_dict()) == {
        f"model.{name}" for name in module.state_dict()
    }


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_losses_of_tokens_are_torchs_with_gradients_for_any_use_of_them(family: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "context": 8, "vocab_rows": 24}
    model = Decoder(
        DecoderConfig.of_size("demo", family, **sizes).changed(layers=2), attention="sdpa"
    ).double()
    tokens, labels = batch()
    weights = torch.randn(2, 5, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 0, 1, 2]] * 2)
    mask = masks.document(torch.tensor([[0, 0, 1, 1, 1]] * 2), causal=True)
    for given in ({}, {"positions": positions, "mask": mask}):
        ours = model.token_losses(tokens, labels, **given)
        theirs = F.cross_entropy(model(tokens, **given).transpose(1, 2), labels, reduction="none")
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
        expected = torch.autograd.grad(theirs, [*model.parameters()], weights)
        found = torch.autograd.grad(ours, [*model.parameters()], weights)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_positions_reach_a_module_that_takes_them() -> None:
    tokens, labels = batch()
    positions = torch.arange(5).expand(2, 5)
    assert as_trainable(WithPositions()).loss(tokens, labels, positions=positions).isfinite()
    with pytest.raises(TypeError, match="positions"):
        as_trainable(Logits()).loss(tokens, labels, positions=positions)


def test_a_module_that_takes_no_mask_is_refused_where_documents_are_to_stay_apart() -> None:
    for given in ({"document_mask": True}, {"mask": lambda **_: None}):
        with pytest.raises(UserError, match=r"^Logits has no loss\(.*positions=.*mask="):
            LanguageModel(Logits(), **given)
    LanguageModel(Logits())


def test_what_a_model_lacks_is_named_with_its_signature_in_one_line() -> None:
    class Half(Trainable):
        def parameter_count(self) -> int:
            return 1

    with pytest.raises(
        UserError, match=r"model=half has no loss\(tokens, labels.*; no flops_per_token\("
    ) as refused:
        check_contract(Half(), "model=half")
    assert "\n" not in str(refused.value)


def test_savings_that_a_model_has_not_are_refused() -> None:
    model = as_trainable(Logits())
    model.save_memory(MemorySavings())
    with pytest.raises(UserError, match="has no memory savings"):
        model.save_memory(MemorySavings("full"))
