"""One vector a sequence from its tokens' states: the mean or the largest, padded and
packed alike, compiled too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flashtrain.models.sequence_pooling import max_of_tokens, mean_of_tokens

LENGTHS = [3, 0, 1, 4]
CU_SEQLENS = torch.tensor([0, 3, 3, 4, 8], dtype=torch.int32)
POOLS = pytest.mark.parametrize("pool", [mean_of_tokens, max_of_tokens])


def padded(packed: torch.Tensor) -> torch.Tensor:
    """The rows of LENGTHS, what is behind them filled with what must not be seen."""
    parts = packed[: sum(LENGTHS)].split(LENGTHS)
    return torch.stack(
        [F.pad(part, (0, 0, 0, max(LENGTHS) - len(part)), value=1e4) for part in parts]
    )


@POOLS
def test_packed_sequences_give_what_each_gives_alone_and_an_empty_one_gives_zero(pool) -> None:
    # Two tokens behind the last sequence belong to none.
    states = torch.randn(10, 5, dtype=torch.float64)
    exact = [
        part.mean(0) if pool is mean_of_tokens else part.amax(0)
        for part in states[:8].split(LENGTHS)
        if len(part)
    ]
    exact.insert(1, torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(pool(states, cu_seqlens=CU_SEQLENS), torch.stack(exact))
    torch.testing.assert_close(pool(padded(states), torch.tensor(LENGTHS)), torch.stack(exact))


@POOLS
def test_gradients_are_those_of_finite_differences(pool) -> None:
    states = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: pool(x, cu_seqlens=CU_SEQLENS), (states,))
    assert torch.autograd.gradcheck(lambda x: pool(padded(x), torch.tensor(LENGTHS)), (states,))


def test_of_equal_states_the_first_gets_the_gradient() -> None:
    states = torch.ones(8, 2, requires_grad=True)
    max_of_tokens(states, cu_seqlens=CU_SEQLENS).sum().backward()
    assert states.grad[:, 0].tolist() == [1, 0, 0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("layout", ["packed", "padded", "whole"])
def test_compiled_half_precision_has_the_gradients_of_eager(layout: str) -> None:
    """Where the backward compares rounded with unrounded states, it finds none that
    is the largest: 0 / 0."""

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        states = (x * weight).to(torch.bfloat16) * 1.3
        if layout == "packed":
            pooled = max_of_tokens(states, cu_seqlens=CU_SEQLENS)
        elif layout == "padded":
            pooled = max_of_tokens(states.view(2, 4, 16), torch.tensor([4, 2]))
        else:
            pooled = max_of_tokens(states.view(2, 4, 16))
        return (pooled.float() ** 2).sum()

    # No two too near each other.
    x = torch.stack([torch.randperm(8) / 3 + 0.7 for _ in range(16)], 1).requires_grad_()
    weight = (torch.rand(16) + 0.5).requires_grad_()
    exact = torch.autograd.grad(loss(x, weight), (x, weight))
    found = torch.autograd.grad(
        torch.compile(loss, fullgraph=True, dynamic=False)(x, weight), (x, weight)
    )
    torch.testing.assert_close(found, exact, atol=0.05, rtol=0.05)
