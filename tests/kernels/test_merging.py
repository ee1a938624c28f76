"""merge_attention: attention over parts of the keys, combined, is attention over all of them."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_formula import tensors as random_tensors

import flashtrain_kernels as fk


def tensors(seqlen_k=12):
    return random_tensors(seqlen_k=seqlen_k, kv_heads=4)


def over_parts(q, k, v, ends):
    """The partial results over the keys from each end to the next."""
    bounds = [0, *ends, k.shape[1]]
    return [
        fk.flash_attn_func(q, k[:, a:b], v[:, a:b], return_lse=True)
        for a, b in itertools.pairwise(bounds)
    ]


@settings(max_examples=30)
@given(ends=st.lists(st.integers(0, 12), max_size=4).map(sorted))
def test_any_split_of_the_keys_gives_the_whole_and_its_gradients(ends):
    inputs = tensors()
    merged, whole = (
        fk.merge_attention(over_parts(*inputs, ends)),
        fk.flash_attn_func(*inputs, return_lse=True),
    )
    weight = torch.randn(2, 6, 4, 5, dtype=torch.float64)
    for got, wanted in zip(merged, whole, strict=True):
        torch.testing.assert_close(got, wanted)
    gradients = [
        torch.autograd.grad((out * weight).sum() + lse.square().sum(), inputs)
        for out, lse in (merged, whole)
    ]
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted)


def test_merging_in_steps_and_of_packed_shapes_is_merging_at_once():
    one, two, three = partials = over_parts(*tensors(), [4, 9])
    out, lse = fk.merge_attention(partials)
    torch.testing.assert_close(
        fk.merge_attention([fk.merge_attention([one, two]), three]), (out, lse)
    )
    packed = fk.merge_attention([(out[0], lse[0]) for out, lse in partials])  # (T, H, D) and (H, T)
    torch.testing.assert_close(packed, (out[0], lse[0]))


def test_merging_in_place_is_merging():
    # Six queries, four keys: below the causal mask the first two see nothing.
    q, k, v = tensors(seqlen_k=4)
    merged, *rest = (
        fk.attention_forward(q, k, v, window_size=window) for window in ((-1, 0), (1, 0), (-1, -1))
    )
    for further in rest:
        wanted = fk.merge_attention([merged, further])
        fk.merge_attention_into(*merged, *further)
        torch.testing.assert_close(merged, wanted)


def test_parts_that_saw_nothing_contribute_nothing_whatever_they_hold():
    q, k, v = tensors()
    real = fk.flash_attn_func(q, k, v, return_lse=True)
    nothing = (
        torch.full_like(real[0], torch.nan),
        torch.full_like(real[1], -torch.inf).requires_grad_(),
    )
    out, lse = fk.merge_attention([nothing, real, nothing])
    torch.testing.assert_close(out, real[0])
    torch.testing.assert_close(lse, real[1])
    gradients = torch.autograd.grad(out.sum() + lse.sum(), (q, nothing[1]))
    assert gradients[0].isfinite().all()
    assert gradients[1].eq(0).all()


def test_rows_that_no_part_saw_stay_zero_and_minus_infinity_with_finite_gradients():
    q, k, v = tensors(seqlen_k=4)  # six queries, four keys: the first two see nothing
    parts = [fk.flash_attn_func(q, k, v, causal=True, return_lse=True) for _ in range(2)]
    out, lse = fk.merge_attention(parts)
    assert out[:, :2].eq(0).all()
    assert lse[:, :, :2].eq(-torch.inf).all()
    torch.testing.assert_close(out, parts[0][0])
    torch.testing.assert_close(lse, parts[0][1] + torch.tensor(2.0).double().log())
    loss = out.square().sum() + torch.where(lse.isfinite(), lse, 0.0).sum()
    assert all(x.isfinite().all() for x in torch.autograd.grad(loss, (q, k, v)))


def test_a_value_that_is_not_finite_stays():
    (out, lse), other = over_parts(*tensors(), [6])
    out = out.detach().clone()
    out[0, 0, 0, 0] = torch.nan
    merged, _ = fk.merge_attention([(out, lse), other])
    assert merged.isnan().sum() == 1


def test_huge_scores_do_not_overflow():
    out, lse = torch.ones(1, 3, 2, 4), torch.full((1, 2, 3), 3e4)
    merged, total = fk.merge_attention([(out, lse), (3 * out, lse)])
    torch.testing.assert_close(merged, 2 * out)
    torch.testing.assert_close(total, lse + torch.tensor(2.0).log())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lower_precision_is_computed_in_float32_and_rounded_once(dtype):
    partials = [(out.to(dtype), lse.float()) for out, lse in over_parts(*tensors(), [4, 9])]
    out, lse = fk.merge_attention(partials)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    wanted = fk.merge_attention([(out.double(), lse.double()) for out, lse in partials])
    torch.testing.assert_close(
        out.double(), wanted[0], atol=torch.finfo(dtype).eps * 2, rtol=torch.finfo(dtype).eps
    )
    mixed, _ = fk.merge_attention([(partials[0][0].float(), partials[0][1]), *partials[1:]])
    assert mixed.dtype == torch.float32


def test_it_compiles_whole():
    partials = [(out.detach(), lse.detach()) for out, lse in over_parts(*tensors(), [4])]
    compiled = torch.compile(fk.merge_attention, backend="aot_eager", fullgraph=True)
    for got, wanted in zip(compiled(partials), fk.merge_attention(partials), strict=True):
        torch.testing.assert_close(got, wanted)


OUT, LSE = torch.zeros(2, 6, 4, 5), torch.zeros(2, 4, 6)
MISTAKES = [
    (iter([]), TypeError, "partials must be a sequence of pairs"),
    ([], ValueError, r"partials must hold one pair \(out, lse\) or more, not none"),
    ([OUT], TypeError, r"partials\[0\] must be a pair of tensors \(out, lse\), not Tensor"),
    ([(OUT[0, 0], LSE)], ValueError, r"partials\[0\]\[0\] must have the shape .* not \(4, 5\)"),
    (
        [(OUT, OUT)],
        ValueError,
        r"partials\[0\]\[1\] must have the shape \(2, 4, 6\), not \(2, 6, 4, 5\)",
    ),
    (
        [(OUT, LSE), (OUT[:, :3], LSE)],
        ValueError,
        r"partials\[1\]\[0\] must have the shape \(2, 6, 4, 5\)",
    ),
    (
        [(OUT, LSE), (OUT, LSE.long())],
        TypeError,
        r"partials\[1\]\[1\] must be .*float32.*, not int64",
    ),
    ([(OUT, LSE.to("meta"))], ValueError, r"partials\[0\]\[1\] is on meta"),
]


@pytest.mark.parametrize(
    ("partials", "error", "message"), MISTAKES, ids=[mistake[2][:40] for mistake in MISTAKES]
)
def test_a_mistake_is_named(partials, error, message):
    with pytest.raises(error, match=message):
        fk.merge_attention(partials)
