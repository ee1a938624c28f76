"""flash, sdpa and standard mean the same attention."""

from __future__ import annotations

import pytest
import torch

from flashtrain.models.attention_functions import ATTENTION_FUNCTIONS, AttentionOptions, plan_mask
from flashtrain_kernels import Mask, block_mask, masks

NAMES = sorted(ATTENTION_FUNCTIONS)


def attend(name, q, k, v, **options):
    return ATTENTION_FUNCTIONS[name](q, k, v, AttentionOptions(**options))


def assert_follows(name, q, k, v, expected, **options):
    """The attention of that name gives `expected`, and its gradients those of the definition."""
    out = attend(name, q, k, v, scale=0.3, **options)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    torch.testing.assert_close(
        torch.autograd.grad((out * weight).sum(), (q, k, v)), wanted, atol=1e-10, rtol=0
    )


def random_qkv(queries: int, keys: int, heads: int, kv_heads: int, head_dim: int = 8):
    torch.manual_seed(0)
    return tuple(
        torch.randn(2, length, number, head_dim, dtype=torch.float64, requires_grad=True)
        for length, number in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    )


def by_definition(q, k, v, sees, scale):
    """Attention row by row, from the words of the module's docstring. sees:
    (row, query, key) -> bool."""
    rows, queries, heads, head_dim = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    out = torch.zeros(rows, queries, heads, head_dim, dtype=q.dtype)
    for b in range(rows):
        for i in range(queries):
            seen = [j for j in range(keys) if sees(b, i, j)]
            for h in range(heads):
                if seen:
                    weights = ((k[b, seen, h // group] @ q[b, i, h]) * scale).softmax(dim=0)
                    out[b, i, h] = weights @ v[b, seen, h // group]
    return out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads"),
    [(7, 7, 3, 3), (7, 7, 4, 2), (1, 9, 2, 1), (3, 9, 2, 2), (5, 3, 2, 2)],
)
def test_every_attention_and_its_gradients_follow_the_definition(
    name, causal, queries, keys, heads, kv_heads
):
    q, k, v = random_qkv(queries, keys, heads, kv_heads)
    expected = by_definition(
        q, k, v, lambda b, i, j: not causal or j <= i + keys - queries, scale=0.3
    )
    assert_follows(name, q, k, v, expected, causal=causal)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
def test_documents_limit_what_is_seen_in_every_attention(
    name, causal, documents_of_lengths, mask_of_lengths
):
    lengths = [3, 4], [1, 2, 4]
    start, end = documents_of_lengths(*lengths)
    q, k, v = random_qkv(7, 7, 4, 2)
    expected = by_definition(
        q, k, v, lambda b, i, j: start[b, i] <= j < end[b, i] and (j <= i or not causal), scale=0.3
    )
    assert_follows(
        name, q, k, v, expected, causal=False, mask=mask_of_lengths(*lengths, causal=causal)
    )


@pytest.mark.parametrize("name", NAMES)
def test_any_mask_will_do_and_a_query_that_sees_nothing_gives_zeros_and_no_gradient(name):
    # Row 0 has a token of no document in the middle; global tokens make two intervals for a query.
    documents = masks.Documents(
        torch.tensor([[0, 0, 0, 0, 4, 4, 4], [0] * 7], dtype=torch.int32),
        torch.tensor([[3, 3, 3, 0, 7, 7, 7], [7] * 7], dtype=torch.int32),
    )
    mask = masks.global_window(7, 1, (1, 1), documents=documents)
    visible = mask.dense()
    assert not visible[0, 3].any()
    q, k, v = random_qkv(7, 7, 4, 2)
    expected = by_definition(q, k, v, lambda b, i, j: bool(visible[b, i, j]), scale=0.3)
    assert_follows(name, q, k, v, expected, causal=False, mask=mask)


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_takes_the_place_of_the_causal_rule(name):
    q, k, v = random_qkv(7, 7, 2, 2)
    expected = by_definition(q, k, v, lambda b, i, j: True, scale=0.3)
    assert_follows(name, q, k, v, expected, causal=True, mask=masks.full(7))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("packed", [False, True])
def test_dropout_keeps_the_mean_of_the_output_and_of_the_gradients(name, packed, mask_of_lengths):
    inputs = random_qkv(6, 6, 2, 1)
    options = {
        "causal": not packed,
        "scale": 0.3,
        "mask": mask_of_lengths([4, 2]) if packed else None,
    }
    torch.manual_seed(1)
    weight = torch.randn(2, 6, 2, 8, dtype=torch.float64)

    def results(dropout):
        out = attend(name, *inputs, **options, dropout=dropout)
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]

    full = results(0.0)
    draws = [results(0.25) for _ in range(200)]
    assert not torch.equal(draws[0][0], draws[1][0])
    for exact, *drawn in zip(full, *draws, strict=True):
        deviation = torch.stack(drawn).std(0).clamp(min=0.01) / len(drawn) ** 0.5
        assert ((torch.stack(drawn).mean(0) - exact) / deviation).abs().max() < 5


@pytest.mark.parametrize("name", NAMES)
def test_dropout_drops_each_weight_with_its_probability_and_scales_the_others_up(name):
    # Equal scores and an identity for values: the output is the attention weights themselves.
    zeros = torch.zeros(8, 32, 4, 32)
    values = torch.eye(32)[None, :, None].expand(8, 32, 4, 32)
    torch.manual_seed(0)
    weights = attend(name, zeros, zeros, values, causal=False, scale=0.3, dropout=0.25)
    dropped = weights == 0
    torch.testing.assert_close(weights[~dropped], torch.full_like(weights[~dropped], 1 / 32 / 0.75))
    # 32,768 weights: five standard deviations of their share are 0.012. Heads and rows
    # draw for themselves.
    assert dropped.float().mean().item() == pytest.approx(0.25, abs=0.012)
    flat = dropped.transpose(1, 2).reshape(32, -1)
    assert len({tuple(one.tolist()) for one in flat}) == 32


@pytest.mark.parametrize(("queries", "keys", "kv_heads"), [(96, 96, 4), (64, 128, 2), (32, 80, 1)])
def test_without_gradients_sdpa_computes_a_pattern_by_blocks_of_queries(
    queries, keys, kv_heads, monkeypatch
):
    def built(*_):
        raise AssertionError("a matrix of all queries and keys was built")

    q, k, v = random_qkv(queries, keys, 4, kv_heads)
    blocks = torch.rand(1, queries // 16, keys // 16) < 0.4
    blocks[0, 1] = False  # these queries see nothing
    options = {
        "causal": False,
        "scale": 0.3,
        "mask": block_mask(blocks, block_size=16, seqlen_q=queries, seqlen_k=keys),
    }
    with torch.no_grad():
        expected = attend("standard", q, k, v, **options)
        monkeypatch.setattr("flashtrain.models.attention_functions.visible_keys", built)
        out = attend("sdpa", q, k, v, **options)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    assert not out[:, 16:32].any()


@pytest.mark.parametrize(
    ("heads", "length", "options"),
    [(1, 64, {"causal": True}), (4, 64, {}), (1, 60, {})],
    ids=["band", "heads", "part"],
)
def test_other_patterns_of_blocks_are_computed_with_the_whole_matrix(heads, length, options):
    q, k, v = random_qkv(length, length, 4, 4)
    blocks = torch.rand(heads, 4, 4) < 0.7
    mask = block_mask(blocks, block_size=16, seqlen_q=length, seqlen_k=length, **options)
    with torch.no_grad():
        out, expected = (
            attend(name, q, k, v, causal=False, scale=0.3, mask=mask)
            for name in ("sdpa", "standard")
        )
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("queries", "keys", "rows"),
    [(3, 7, ([7], [3, 4])), (7, 3, ([7], [3, 4])), (7, 7, ([7], [3, 4], [7]))],
)
def test_a_mask_of_other_sizes_or_rows_is_refused(name, queries, keys, rows, mask_of_lengths):
    with pytest.raises((ValueError, RuntimeError), match=r"mask|must match"):
        attend(
            name,
            *random_qkv(queries, keys, 2, 2),
            causal=False,
            scale=0.3,
            mask=mask_of_lengths(*rows),
        )


@pytest.mark.parametrize(
    ("weights", "autocast", "planned_for"),
    [
        (torch.float32, None, torch.float32),
        (torch.bfloat16, None, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16, torch.float16),
        (torch.float64, torch.bfloat16, torch.float64),
    ],
)
def test_a_mask_is_planned_for_the_dtype_that_attention_computes_in(
    weights, autocast, planned_for, mask_of_lengths, monkeypatch
):
    asked = []
    monkeypatch.setattr(
        Mask, "planned", lambda self, *sizes, **kind: asked.append((*sizes, kind)) or self
    )
    monkeypatch.setattr(
        "flashtrain_kernels.dispatch.implementation_for", lambda device_type: "portable"
    )
    mask, x = mask_of_lengths([5]), torch.zeros(1, 5, 16, dtype=weights)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        plan_mask(mask, x, attention="flash", head_dim=8)
        plan_mask(mask, x, attention="flash", head_dim=8, dropout=0.1)
        computed = torch.nn.Linear(16, 16, dtype=weights)(x).dtype
    assert computed == planned_for
    assert asked == [(8, planned_for, {"rich": False}), (8, planned_for, {"rich": True})]


@pytest.mark.parametrize("name", NAMES)
def test_without_our_kernels_a_mask_is_not_planned(name, mask_of_lengths):
    mask = mask_of_lengths([5])
    assert plan_mask(mask, torch.zeros(1, 5, 16), attention=name, head_dim=8) is mask
    assert plan_mask(None, torch.zeros(1, 5, 16), attention=name, head_dim=8) is None
