"""The oracle itself: against a textbook's formulas, against numerical gradients, and where
numbers are not finite."""

import pytest
import torch
from plain_formula import assert_same, plain_attention
from plain_formula import tensors as random_tensors

from flashtrain_kernels import philox, reference
from flashtrain_kernels.masks import Mask
from flashtrain_kernels.options import Options

SEED = torch.tensor([99, 0, 0])


def tensors(seqlen_q=5, seqlen_k=7, head_dim=3, **sizes):
    return random_tensors(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, **sizes)


def shuffled_mask():
    """Two rows whose tokens stand in any order: 5 queries and 7 keys of two sequences,
    two intervals a query."""
    keys = torch.tensor([[3, 0, 6, 1, 2, 5, 4], [0, 1, 2, 3, 4, 5, 6]], dtype=torch.int32)
    low = torch.tensor([[0, 0, 4, 4, 9], [0, 0, 0, 4, 4]])
    high = torch.tensor([[2, 4, 5, 7, 9], [1, 2, 4, 5, 7]])
    position = torch.tensor([[1, 3, 4, 6, 0], [0, 1, 3, 4, 6]])
    start = torch.tensor([[0, 0, 4, 4, 0], [0, 0, 0, 4, 4]])
    sequence = torch.tensor([[0, 0, 1, 1, 0], [2, 2, 2, 3, 3]])
    low2 = torch.tensor([[0, 5, 0, 0, 0], [0, 0, 6, 0, 0]])
    high2 = torch.tensor([[0, 6, 0, 0, 0], [0, 0, 7, 0, 0]])
    rows = torch.stack([low, high, position, start, sequence, low2, high2]).int()
    return Mask(rows, keys, 7)


def shuffled_pairs(mask):
    pairs = torch.zeros(2, 1, 5, 7, dtype=torch.bool)
    low, high, _, _, _, low2, high2 = mask.queries.tolist()
    for b in range(2):
        for i in range(5):
            for j, position in enumerate(mask.keys[b].tolist()):
                pairs[b, 0, i, j] = (
                    low[b][i] <= position < high[b][i] or low2[b][i] <= position < high2[b][i]
                )
    return pairs


def test_a_mask_is_read_by_positions_not_by_indices():
    inputs, mask = tensors(), shuffled_mask()
    slopes = torch.rand(4, 4)  # four sequences, four heads
    options = Options(scale=0.5, mask=mask, alibi_slopes=slopes, dropout_p=0.3, seed=SEED)
    kept = reference.dropout_mask(inputs[0].shape, inputs[1].shape, options, "cpu")
    added = torch.zeros(2, 4, 5, 7, dtype=torch.float64)
    for b in range(2):
        for i in range(5):
            for j in range(7):
                distance = abs(mask.queries[2, b, i] - mask.keys[b, j])
                added[b, :, i, j] = -slopes[mask.queries[4, b, i]] * distance
    ours = reference.apply(*inputs, options)
    seen = shuffled_pairs(mask)
    assert torch.equal(mask.dense()[:, None], seen)
    wanted = plain_attention(*inputs, scale=0.5, seen=seen, bias=added, kept=kept, p=0.3)
    assert_same(ours, wanted, inputs)


def test_dropout_counts_positions_from_the_start_of_the_sequence():
    mask = shuffled_mask()
    options = Options(scale=1.0, mask=mask, dropout_p=0.5, seed=torch.tensor([7, 10, 20]))
    kept = reference.dropout_mask((2, 5, 4, 3), (2, 7, 2, 3), options, "cpu")
    assert kept.shape == (2, 4, 5, 7)
    for b, h, i, j in [(0, 0, 0, 0), (0, 3, 3, 2), (1, 2, 4, 5), (1, 1, 3, 0)]:
        position, start, sequence = mask.queries[2:5, b, i]
        parts = (sequence + 10, torch.tensor(h + 20), position - start, mask.keys[b, j] - start)
        assert kept[b, h, i, j] == philox.keep_mask(torch.tensor([7, 0, 0]), *parts, 0.5)


def test_without_a_mask_dropout_counts_queries_in_key_positions_and_sequences_by_row():
    options = Options(scale=1.0, dropout_p=0.5, seed=SEED)
    kept = reference.dropout_mask((2, 5, 4, 3), (2, 7, 2, 3), options, "cpu")
    row, head = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None]
    query, key = torch.arange(2, 7)[:, None], torch.arange(7)
    assert torch.equal(kept, philox.keep_mask(SEED, row, head, query, key, 0.5))


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window_size": (1, 2), "softcap": 1.2},
        {"mask": shuffled_mask(), "alibi_slopes": torch.tensor([0.1, 0.2])},
        {"dropout_p": 0.3, "dropout_seed": 5, "causal": True},
    ],
    ids=["causal", "window softcap", "mask alibi", "dropout"],
)
def test_its_gradients_are_the_numerical_ones(options):
    bias = torch.randn(2, 2, 5, 7, dtype=torch.float64, requires_grad=True)
    inputs = (*tensors(heads=2, kv_heads=1, head_dim=2), bias)

    def attention(q, k, v, bias):
        out, lse = reference.attention(q, k, v, bias=bias, return_lse=True, **options)
        return out, torch.where(lse.isfinite(), lse, 0.0)

    assert torch.autograd.gradcheck(attention, inputs)


def test_half_precision_is_computed_in_float32_and_returned_as_it_came():
    inputs = tensors(dtype=torch.bfloat16)
    out, lse = reference.attention(*inputs, causal=True, return_lse=True)
    wanted = reference.attention(*(x.detach().float() for x in inputs), causal=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out, wanted.bfloat16(), atol=0, rtol=0)
    assert {x.dtype for x in torch.autograd.grad(out.float().sum(), inputs)} == {torch.bfloat16}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("how", ["band", "mask", "bias"])
def test_masked_numbers_that_are_not_finite_contribute_nothing_forward_or_backward(bad, how):
    clean = [x.detach() for x in tensors(seqlen_q=4, seqlen_k=4, heads=2, kv_heads=2)]
    options = {"causal": True}
    if how == "mask":
        rows = torch.tensor([[0, 0, 0, 0], [1, 2, 3, 4], [0, 1, 2, 3], [0, 0, 0, 0], [0, 0, 0, 0]])
        options = {"mask": Mask(rows[:, None].int(), None, 4)}
    if how == "bias":
        options = {"bias": torch.full((1, 1, 4, 4), -torch.inf, dtype=torch.float64).triu(1)}
    weight = torch.randn(2, 4, 2, 3, dtype=torch.float64)

    def run(inputs):
        inputs = [x.clone().requires_grad_() for x in inputs]
        out = reference.attention(*inputs, **options)
        return out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)

    wanted = run(clean)
    everywhere = [x.clone() for x in clean]
    for x in everywhere:
        x[:, 2] = bad  # the queries 2 and 3 see it, or are it
    out, dq, dk, dv = run(everywhere)
    torch.testing.assert_close(out[:, :2], wanted[0][:, :2])
    torch.testing.assert_close(dq[:, :2], wanted[1][:, :2])
    for spoilt in (out[:, 2:], dq[:, 2:], dk, dv[:, :3]):
        assert not spoilt.isfinite().any()
    # A bad query spoils the gradients of the keys it sees, 0 to 2, and not the key 3.
    _, _, dk, dv = run([everywhere[0], *clean[1:]])
    torch.testing.assert_close(dk[:, 3], wanted[2][:, 3])
    torch.testing.assert_close(dv[:, 3], wanted[3][:, 3])
    assert not dk[:, :3].isfinite().any()


def test_a_visible_value_that_is_not_finite_reaches_its_column_even_where_dropout_drops():
    q, k, v = (x.detach().clone() for x in tensors())
    v[:, 3, :, 1] = torch.nan
    out = reference.attention(q, k, v, dropout_p=0.9, dropout_seed=1)
    assert out[..., 1].isnan().all()
    assert out[..., [0, 2]].isfinite().all()


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 3), (3, 0), (0, 0)])
def test_no_queries_or_no_keys(seqlen_q, seqlen_k):
    inputs = tensors(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    out, lse = reference.attention(*inputs, return_lse=True, dropout_p=0.5)
    assert (out.shape, lse.shape) == ((2, seqlen_q, 4, 3), (2, 4, seqlen_q))
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    assert all(x.eq(0).all() for x in torch.autograd.grad(out.sum(), inputs))
