"""scaled_dot_product_attention: torch's own function says what is right, shapes
and masks included."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_formula import assert_one_graph_serves
from torch.nn.functional import scaled_dot_product_attention as torchs

import flashtrain_kernels as fk
from flashtrain_kernels import dispatch


@pytest.fixture(autouse=True, params=["torch", "reference"])
def implementation(request):
    with dispatch.force(request.param):
        yield request.param


def draw(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def assert_as_torch(query, key, value, attn_mask=None, **options):
    inputs = [query, key, value]
    if attn_mask is not None and attn_mask.requires_grad:
        inputs.append(attn_mask)
    got = fk.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    wanted = torchs(query, key, value, attn_mask, **options)
    assert got.shape == wanted.shape
    torch.testing.assert_close(got, wanted)
    weight = torch.randn_like(wanted)
    for one, other in zip(
        *(torch.autograd.grad((out * weight).sum(), inputs) for out in (got, wanted)), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("leading", [(), (3,), (2, 4), (2, 3, 4), (2, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("lengths", [(6, 6), (6, 9), (9, 6), (1, 5)], ids=str)
def test_any_number_of_dimensions_and_lengths(is_causal, leading, lengths):
    seqlen_q, seqlen_k = lengths
    key, value = draw(*leading, seqlen_k, 5), draw(*leading, seqlen_k, 5)
    assert_as_torch(draw(*leading, seqlen_q, 5), key, value, is_causal=is_causal)


def test_is_causal_is_aligned_top_left():
    value = torch.eye(4)[None, None]
    out = fk.scaled_dot_product_attention(torch.zeros(1, 1, 2, 4), value, value, is_causal=True)
    assert (out[0, 0] > 0).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]


@pytest.mark.parametrize("value_dim", [1, 4, 5, 9])
def test_values_of_another_head_dimension(value_dim):
    assert_as_torch(draw(2, 4, 6, 5), draw(2, 4, 7, 5), draw(2, 4, 7, value_dim), is_causal=True)


@pytest.mark.parametrize(
    "shape", [(7,), (6, 7), (6, 1), (4, 6, 7), (1, 1, 1, 7), (2, 1, 1, 7), (2, 4, 6, 7)], ids=str
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_any_shape_that_broadcasts(shape, kind):
    torch.manual_seed(0)
    mask = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        if kind == "float"
        else torch.rand(shape) > 0.3
    )
    if len(shape) == 1:  # torch's own function wants two dimensions
        got = fk.scaled_dot_product_attention(
            *(inputs := (draw(2, 4, 6, 5), draw(2, 4, 7, 5), draw(2, 4, 7, 5))), mask
        )
        torch.testing.assert_close(got, torchs(*inputs, mask[None]))
    else:
        assert_as_torch(draw(2, 4, 6, 5), draw(2, 4, 7, 5), draw(2, 4, 7, 5), mask)


@pytest.mark.parametrize(
    ("leading", "shape"),
    [*(((2, 3, 4), shape) for shape in [(2, 1, 1, 6, 7), (2, 3, 1, 1, 7), (1, 3, 4, 6, 7), (6, 7)]),
     ((3,), (3, 6, 7)), ((), (6, 7))],
    ids=str,
)  # fmt: skip
def test_masks_with_more_leading_dimensions_and_with_fewer(leading, shape):
    assert_as_torch(*(draw(*leading, length, 5) for length in (6, 7, 7)), torch.rand(shape) > 0.3)


def test_a_query_that_its_mask_hides_everything_from_gives_zero_and_no_gradient():
    mask = torch.ones(6, 7, dtype=torch.bool)
    mask[2] = False
    query, key, value = draw(2, 4, 6, 5), draw(2, 4, 7, 5), draw(2, 4, 7, 5)
    out = fk.scaled_dot_product_attention(query, key, value, mask)
    assert out[:, :, 2].eq(0).all()
    gradients = torch.autograd.grad(out.sum(), (query, key, value))
    assert gradients[0][:, :, 2].eq(0).all()
    assert all(x.isfinite().all() for x in gradients)


@settings(max_examples=25)
@given(
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1), (6, 3)]),
    lengths=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    scale=st.sampled_from([None, 0.5]),
    is_causal=st.booleans(),
)
def test_grouped_heads(heads, lengths, scale, is_causal):
    query, key = draw(2, heads[0], lengths[0], 5), draw(2, heads[1], lengths[1], 5)
    assert_as_torch(
        query,
        key,
        draw(2, heads[1], lengths[1], 5),
        scale=scale,
        is_causal=is_causal,
        enable_gqa=True,
    )


def test_leading_dimensions_and_heads_of_1_broadcast():
    for batches in [(1, 1), (3, 1), (1, 3)]:
        query, key = draw(batches[0], 4, 6, 5), draw(batches[1], 1, 7, 5)
        wide = (
            [x.expand(3, 4, -1, -1) for x in (query, key, draw(1, 4, 7, 5))]
            if 3 in batches
            else None
        )
        got = fk.scaled_dot_product_attention(query, key, draw(1, 1, 7, 5))
        assert got.shape == (max(batches), 4, 6, 5)
        if wide is not None:
            wanted = torchs(wide[0], wide[1], draw(1, 1, 7, 5).expand(3, 4, -1, -1))
            torch.testing.assert_close(got, wanted)
    got = fk.scaled_dot_product_attention(draw(1, 1, 6, 5), draw(2, 4, 7, 5), draw(2, 4, 7, 5))
    torch.testing.assert_close(
        got, torchs(draw(1, 1, 6, 5).expand(2, 4, 6, 5), draw(2, 4, 7, 5), draw(2, 4, 7, 5))
    )


def test_dropout_repeats_with_torchs_generator():
    inputs = draw(2, 4, 16, 5), draw(2, 4, 16, 5), draw(2, 4, 16, 5)
    torch.manual_seed(0)
    first, second = (fk.scaled_dot_product_attention(*inputs, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(fk.scaled_dot_product_attention(*inputs, dropout_p=0.5), first)
    assert not torch.equal(first, second)
    many = torch.stack(
        [fk.scaled_dot_product_attention(*inputs, dropout_p=0.5) for _ in range(300)]
    ).mean(0)
    torch.testing.assert_close(many, torchs(*inputs), atol=0.35, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_precision(dtype):
    inputs = [draw(2, 4, 6, 5, dtype=dtype).detach() for _ in range(3)]
    mask = torch.randn(6, 6)
    for added in (mask.to(dtype), mask):
        got = fk.scaled_dot_product_attention(*inputs, added)
        assert got.dtype == dtype
        exact, eps = torchs(*(x.double() for x in inputs), added.double()), torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), exact, atol=4 * eps, rtol=4 * eps)


def test_torch_compile_takes_the_whole_graph_and_changing_lengths(implementation):
    calls = [[draw(2, 4, length, 8).detach() for _ in range(3)] for length in (6, 9, 12)]
    assert_one_graph_serves(
        lambda q, k, v: fk.scaled_dot_product_attention(q, k, v, is_causal=True), calls
    )


X = torch.zeros(2, 4, 6, 8)
WIDE, ODD = torch.zeros(1, 1, 2, 513), torch.zeros(6, 6)
MISTAKES = [
    ("query", (None, X, X), {}, TypeError),
    ("key", (X, X[0], X), {}, ValueError),
    ("query", (X[0, 0, 0],) * 3, {}, ValueError),
    ("query", (X.long(), X, X), {}, TypeError),
    ("value", (X, X, X.double()), {}, TypeError),
    ("key", (X, X.to("meta"), X), {}, ValueError),
    ("query and key", (X, X[..., :4], X), {}, ValueError),
    ("query's head dimension", (WIDE, WIDE, WIDE), {}, ValueError),
    ("value's head dimension", (X, X, torch.zeros(2, 4, 6, 600)), {}, ValueError),
    ("key and value", (X, X[:, :, :5], X), {}, ValueError),
    (".*leading dimensions", (X, torch.zeros(3, 4, 6, 8), X), {}, ValueError),
    ("key and value", (X, X[:, :2], X), {}, ValueError),
    ("query's heads .*enable_gqa=True", (X, X[:, :2], X[:, :2]), {}, ValueError),
    ("query's heads", (X, X[:, :3], X[:, :3]), {"enable_gqa": True}, ValueError),
    ("attn_mask", (X, X, X), {"attn_mask": [1]}, TypeError),
    ("attn_mask", (X, X, X), {"attn_mask": ODD.long()}, TypeError),
    ("attn_mask", (X, X, X), {"attn_mask": ODD[:5]}, ValueError),
    ("attn_mask", (X, X, X), {"attn_mask": torch.zeros(1, 2, 4, 6, 6)}, ValueError),
    ("attn_mask", (X, X, X), {"attn_mask": ODD.to("meta")}, ValueError),
    ("attn_mask", (X, X, X), {"attn_mask": ODD, "is_causal": True}, ValueError),
    ("dropout_p", (X, X, X), {"dropout_p": 1.0}, ValueError),
    ("is_causal", (X, X, X), {"is_causal": 1}, TypeError),
    ("enable_gqa", (X, X, X), {"enable_gqa": None}, TypeError),
    ("scale", (X, X, X), {"scale": -1.0}, ValueError),
]


@pytest.mark.parametrize(("named", "tensors", "options", "error"), MISTAKES)
def test_a_mistake_is_named(named, tensors, options, error):
    with pytest.raises(error, match=f"^{named}"):
        fk.scaled_dot_product_attention(*tensors, **options)
