"""flash, sdpa and standard mean the same attention."""

from __future__ import annotations

import math

import pytest
import torch

from flashtrain.errors import UserError
from flashtrain.models.attention_functions import ATTENTION_FUNCTIONS, attention_function, visible_keys

NAMES = sorted(ATTENTION_FUNCTIONS)
# flash computes in float32 at most: its test is the float64 definition, to float32's rounding.
DTYPES = {"flash": torch.float32, "sdpa": torch.float64, "standard": torch.float64}
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-10}


def assert_follows(name, q, k, v, expected, **options):
    """The attention of that name gives `expected`, and its gradients those of the definition."""
    dtype = DTYPES[name]
    tolerance = TOLERANCES[dtype]
    out = ATTENTION_FUNCTIONS[name](q.to(dtype), k.to(dtype), v.to(dtype), scale=0.3, **options).double()
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=0)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for gradient, correct in zip(torch.autograd.grad((out * weight).sum(), (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(gradient, correct, atol=tolerance, rtol=0)


def random_qkv(queries: int, keys: int, heads: int, kv_heads: int, head_dim: int = 8):
    torch.manual_seed(0)
    return tuple(
        torch.randn(2, length, number, head_dim, dtype=torch.float64, requires_grad=True)
        for length, number in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    )


def by_definition(q, k, v, causal, scale, documents=None):
    """Attention row by row, from the words of the module's docstring."""
    rows, queries, heads, head_dim = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    out = torch.zeros(rows, queries, heads, head_dim, dtype=q.dtype)
    for b in range(rows):
        for i in range(queries):
            seen = [
                j
                for j in range(keys)
                if (not causal or j <= i + keys - queries)
                and (documents is None or documents.start[b, i] <= j < documents.end[b, i])
            ]
            for h in range(heads):
                if seen:
                    weights = ((k[b, seen, h // group] @ q[b, i, h]) * scale).softmax(dim=0)
                    out[b, i, h] = weights @ v[b, seen, h // group]
    return out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads"), [(7, 7, 3, 3), (7, 7, 4, 2), (1, 9, 2, 1), (3, 9, 2, 2), (5, 3, 2, 2)]
)
def test_every_attention_and_its_gradients_follow_the_definition(name, causal, queries, keys, heads, kv_heads):
    q, k, v = random_qkv(queries, keys, heads, kv_heads)
    expected = by_definition(q, k, v, causal, scale=0.3)
    assert_follows(name, q, k, v, expected, causal=causal, documents=None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
def test_documents_limit_what_is_seen_in_every_attention(name, causal, documents_of_lengths):
    documents = documents_of_lengths([3, 4], [1, 2, 4])
    q, k, v = random_qkv(7, 7, 4, 2)
    expected = by_definition(q, k, v, causal, scale=0.3, documents=documents)
    assert_follows(name, q, k, v, expected, causal=causal, documents=documents)


@pytest.mark.parametrize("name", ["sdpa", "standard"])
def test_dropout_keeps_the_mean(name):
    q, k, v = (tensor.detach() for tensor in random_qkv(6, 6, 2, 2))
    full = ATTENTION_FUNCTIONS[name](q, k, v, causal=True, scale=1 / math.sqrt(8), documents=None)
    dropped = torch.stack(
        [
            ATTENTION_FUNCTIONS[name](q, k, v, causal=True, scale=1 / math.sqrt(8), documents=None, dropout=0.3)
            for _ in range(1000)
        ]
    )
    assert not torch.equal(dropped[0], dropped[1])
    torch.testing.assert_close(dropped.mean(dim=0), full, atol=0.15, rtol=0)


def test_documents_need_as_many_queries_as_keys(documents_of_lengths):
    with pytest.raises(UserError, match=r"3 queries and 7 keys with documents"):
        visible_keys(3, 7, True, documents_of_lengths([7]), "cpu")


def test_a_misspelt_attention_gets_the_near_match():
    with pytest.raises(UserError, match=r"unknown attention 'flahs'. Did you mean 'flash'"):
        attention_function("flahs")


def test_flash_with_dropout_is_refused_and_says_what_is_possible():
    with pytest.raises(UserError, match=r"no dropout. Possible: dropout 0, or attention=sdpa or standard"):
        attention_function("flash", dropout=0.1)
