"""Without gradients, sdpa computes a pattern of blocks one block of queries at a time, and means the same."""

from __future__ import annotations

import pytest
import torch

from flashtrain.models.attention_functions import sdpa_attention, takes_block_rows
from flashtrain_kernels import block_mask


def random_qkv(queries: int, keys: int, heads: int = 4, kv_heads: int = 4):
    return tuple(
        torch.randn(2, length, number, 8, dtype=torch.float64)
        for length, number in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    )


def by_the_whole_matrix(q, k, v, mask):
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * 0.3
    weights = torch.softmax(scores.masked_fill(~mask.dense(), -torch.inf), dim=-1).nan_to_num(0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


@pytest.mark.parametrize(("queries", "keys", "kv_heads"), [(96, 96, 4), (64, 128, 2), (32, 80, 1)])
def test_it_is_the_attention_of_the_whole_matrix_and_builds_none(queries, keys, kv_heads, monkeypatch) -> None:
    def built(*_):
        raise AssertionError("a matrix of all queries and keys was built")

    monkeypatch.setattr("flashtrain.models.attention_functions.visible_keys", built)
    q, k, v = random_qkv(queries, keys, kv_heads=kv_heads)
    blocks = torch.rand(1, queries // 16, keys // 16) < 0.4
    blocks[0, 1] = False  # these queries see nothing
    mask = block_mask(blocks, block_size=16, seqlen_q=queries, seqlen_k=keys)
    assert takes_block_rows(q, k, v, mask)
    out = sdpa_attention(q, k, v, causal=False, scale=0.3, mask=mask)
    torch.testing.assert_close(out, by_the_whole_matrix(q, k, v, mask), atol=1e-12, rtol=0)
    assert not out[:, 16:32].any()


def test_a_band_another_pattern_for_each_head_a_part_of_a_block_and_gradients_take_the_matrix() -> None:
    q, k, v = random_qkv(64, 64)
    blocks = torch.ones(1, 4, 4, dtype=torch.bool)
    whole = block_mask(blocks, block_size=16, seqlen_q=64, seqlen_k=64)
    assert takes_block_rows(q, k, v, whole)
    assert not takes_block_rows(q, k, v, None)
    others = (
        block_mask(blocks, block_size=16, seqlen_q=64, seqlen_k=64, causal=True),
        block_mask(blocks.expand(4, 4, 4), block_size=16, seqlen_q=64, seqlen_k=64),
        block_mask(blocks, block_size=16, seqlen_q=60, seqlen_k=60),
    )
    for mask in others:
        assert not takes_block_rows(q, k, v, mask)
    learned = q.requires_grad_()
    assert not takes_block_rows(learned, k, v, whole)
    with torch.no_grad():
        assert takes_block_rows(learned, k, v, whole)
