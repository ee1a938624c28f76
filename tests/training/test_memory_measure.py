"""The memory of one sample, measured on a model that states no sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flashtrain.models.trainable import as_trainable
from flashtrain.training.memory_measure import LiveBytes, bytes_of_sample

CPU = torch.device("cpu")


class Recurrent(nn.Module):
    """Embedding, dropout, norm with running statistics, GRU, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(100, 16), nn.Dropout(0.1)
        self.norm, self.gru = nn.BatchNorm1d(16), nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.dropout(self.embedding(tokens)).mT).mT
        return self.head(self.gru(x)[0])


def test_the_bytes_that_are_alive_are_counted_and_their_peak_is_remembered() -> None:
    given = torch.ones(1000)
    with LiveBytes(nn.Module()) as live:
        doubled = given * 2
        view = doubled[:10]
        view.add_(1)
        assert live.now == 4000  # views and changes in place take nothing
        del doubled
        assert live.now == 4000  # the view holds it
        kept = given * 3
        del view
        assert (live.now, live.peak) == (4000, 8000)
        del kept
        assert (live.now, live.peak) == (0, 8000)


def test_memory_of_a_sample_holds_its_logits_with_their_gradients_and_grows_with_its_tokens() -> (
    None
):
    model = as_trainable(Recurrent())
    short, long = (bytes_of_sample(model, tokens, "32-true", CPU) for tokens in (256, 1024))
    assert 3 * 256 * 100 * 4 < short < 8 * 256 * 100 * 4  # three tensors (S, V) at least
    assert long == pytest.approx(4 * short, rel=0.05)


def test_weights_gradients_and_their_copies_are_not_counted_once_more_with_each_sample() -> None:
    class Wide(nn.Module):
        def __init__(self, layers: int) -> None:
            super().__init__()
            self.embedding = nn.Embedding(100, 256)
            self.layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(layers)])

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.layers(self.embedding(tokens)) @ self.embedding.weight.T

    for precision in ("32-true", "bf16-mixed"):
        few, many = (
            bytes_of_sample(as_trainable(Wide(layers)), 8, precision, CPU) for layers in (2, 42)
        )
        each = 8 * 256 * (4 if precision == "32-true" else 2)  # what a layer saves of 8 tokens
        assert 40 * each <= many - few <= 3 * 40 * each  # a layer's weights: 256 KiB


def test_measuring_changes_neither_weights_buffers_gradients_nor_random_numbers() -> None:
    model = as_trainable(Recurrent())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    bytes_of_sample(model, 64, "32-true", CPU)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(one.grad is None for one in model.parameters())


def test_a_model_without_weights_is_measured_alike() -> None:
    with torch.device("meta"):
        model = as_trainable(nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100)))
    planned = bytes_of_sample(model, 256, "32-true", torch.device("meta"))
    model.to_empty(device=CPU)
    assert planned == bytes_of_sample(model, 256, "32-true", CPU)
