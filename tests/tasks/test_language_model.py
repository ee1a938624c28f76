"""What the task makes of a batch before the model sees it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from quiet_trainer import quiet_trainer
from torch.utils.data import DataLoader

from flashtrain import Decoder, DecoderConfig, LanguageModel
from flashtrain.data.packing import Batch
from flashtrain.models import MemorySavings, Trainable


def batch() -> Batch:
    """One row of two documents, of 3 and 5 tokens."""
    tokens = torch.arange(8)[None] % 7
    labels = tokens.roll(-1, 1)
    labels[0, [2, 7]] = -100
    return Batch(
        tokens=tokens,
        labels=labels,
        documents=torch.tensor([[0] * 3 + [1] * 5], dtype=torch.int32),
        positions=torch.tensor([[*range(3), *range(5)]], dtype=torch.int32),
    )


def train_one_step(model: Trainable, document_mask: bool) -> LanguageModel:
    task = LanguageModel(model, document_mask=document_mask)
    quiet_trainer(1).fit(task, DataLoader([batch()], batch_size=None))
    return task


@pytest.mark.parametrize("attention", ["flash", "sdpa", "standard"])
def test_with_a_document_mask_a_packed_row_is_scored_as_its_documents_alone(attention):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig.of_size("demo", vocab_size=7, context=8), attention=attention)
    tokens, labels = batch()["tokens"], batch()["labels"]
    with torch.no_grad():
        first, second = (
            model.loss(tokens[:, part], labels[:, part]).item()
            for part in (slice(0, 3), slice(3, 8))
        )
    task = train_one_step(model, document_mask=True)
    assert task.first_loss == pytest.approx((2 * first + 4 * second) / 6, abs=1e-5)


def test_flops_are_those_of_the_documents_in_a_packed_row():
    model = Decoder(DecoderConfig.of_size("demo", vocab_size=7, context=8), attention="sdpa")
    task = train_one_step(model, document_mask=True)
    keys = (1 + 2 + 3 + 1 + 2 + 3 + 4 + 5) / 8  # that a token sees, on average
    assert task.mean_length == round(2 * keys - 1) == 4
    assert train_one_step(model, document_mask=False).mean_length is None


SAVINGS = [
    MemorySavings(),
    MemorySavings("selective"),
    MemorySavings("full"),
    MemorySavings("full", offload=True),
]


@pytest.mark.parametrize("savings", SAVINGS, ids=lambda savings: savings.describe() or "none")
def test_the_loss_is_compiled_whole_or_under_full_checkpointing_by_blocks(savings, monkeypatch):
    compiled: list[str] = []

    def record(function, **options):
        assert options.items() >= {"dynamic": False, "fullgraph": True}.items()
        compiled.append(function.__name__)
        return function

    monkeypatch.setattr(torch, "compile", record)
    model = Decoder(DecoderConfig.of_size("demo", vocab_size=17, context=8), attention="sdpa")
    model.save_memory(savings)
    task = LanguageModel(model, compile=True)
    task.configure_model()
    assert compiled == (["compute"] * 4 if savings.checkpointing == "full" else ["loss"])


class Doubled(LanguageModel):
    """A task with a loss of its own: twice the model's loss, by its losses of tokens."""

    def loss(self, tokens, labels, **given):
        return 2 * self.model.token_losses(tokens, labels, **given).sum() / (labels != -100).sum()


def test_a_derived_tasks_loss_is_trained_logged_and_compiled(monkeypatch):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig.of_size("demo", vocab_size=7, context=8), attention="sdpa")
    with torch.no_grad():
        expected = 2 * LanguageModel(model, document_mask=True).batch_loss(batch()).item()
    task = Doubled(model, document_mask=True)
    assert task.batch_loss(batch()).item() == pytest.approx(expected, rel=1e-6)
    quiet_trainer(1).fit(task, DataLoader([batch()], batch_size=None))
    assert task.first_loss == pytest.approx(expected, rel=1e-6)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compiled = [kind(model, document_mask=True, compile=True) for kind in (LanguageModel, Doubled)]
    for one in compiled:
        one.configure_model()
    plain, doubled = (one.batch_loss(batch()).item() for one in compiled)
    assert doubled == pytest.approx(2 * plain, rel=1e-5)


class Watched(Trainable):
    """Keeps whether gradients were there when its loss was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.gradients: list[bool] = []

    def loss(self, tokens, labels, **options):
        self.gradients.append(self.weight.grad is not None)
        return self.weight * 1.0


@pytest.mark.parametrize(
    ("accumulate", "there"), [(1, [False] * 4), (2, [False, True, False, True])]
)
def test_a_steps_forward_begins_without_the_gradients_of_the_step_before(accumulate, there):
    model = Watched()
    trainer = quiet_trainer(4 // accumulate, accumulate_grad_batches=accumulate)
    trainer.fit(
        LanguageModel(model, document_mask=False), DataLoader([batch()] * 4, batch_size=None)
    )
    assert model.gradients == there
