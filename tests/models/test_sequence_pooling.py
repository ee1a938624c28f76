"""One vector a sequence from its tokens' states: the mean or the largest, padded and
packed alike, compiled too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flashtrain.errors import UserError
from flashtrain.models.sequence_pooling import EfficientProbing, max_of_tokens, mean_of_tokens

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


def probe(embed: int = 6, queries: int = 3) -> EfficientProbing:
    torch.manual_seed(0)
    return EfficientProbing(embed, queries).double()


def test_efficient_probing_is_its_papers_attention_of_each_query_to_its_part_of_the_values() -> (
    None
):
    """arXiv 2506.10178: a_j = softmax(q_j X^T / sqrt(D)), y_j = a_j V_j with V = X W_V cut into M
    parts, y = [y_1 .. y_M]; for packed and padded sequences, an empty one gives 0."""
    pool, states = probe(), torch.randn(10, 6, dtype=torch.float64)
    queries, values = pool.queries.weight, pool.values.weight
    exact = []
    for part in states[:8].split(LENGTHS):
        weights = (queries @ part.T / 6**0.5).softmax(1)  # (M, S)
        found = [
            weights[j] @ (part @ values.T)[:, 2 * j : 2 * j + 2] if len(part) else torch.zeros(2)
            for j in range(3)
        ]
        exact.append(torch.cat(found).double())
    torch.testing.assert_close(pool(states, cu_seqlens=CU_SEQLENS), torch.stack(exact))
    torch.testing.assert_close(pool(padded(states), torch.tensor(LENGTHS)), torch.stack(exact))
    torch.testing.assert_close(pool(states[None, :3])[0], exact[0])


def test_the_probes_gradients_are_those_of_finite_differences_packed_and_padded() -> None:
    pool, states = probe(), torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    weights = (states, pool.queries.weight, pool.values.weight)
    assert torch.autograd.gradcheck(lambda x, *_: pool(x, cu_seqlens=CU_SEQLENS), weights)
    assert torch.autograd.gradcheck(lambda x, *_: pool(padded(x), torch.tensor(LENGTHS)), weights)


def test_a_probe_has_the_papers_parameters_and_its_queries_divide_the_width() -> None:
    assert sum(one.numel() for one in probe(384, 32).parameters()) == 32 * 384 + 384**2
    with pytest.raises(UserError, match="queries=5"):
        EfficientProbing(384, 5)
