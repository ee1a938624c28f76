"""The Triton kernels on a CPU, in Triton's interpreter, against the float64 reference.

Triton decides when it is imported whether to interpret, and then for the whole process. So these tests are no part of
the
ordinary collection: test_portable.py runs this file in a process of its own. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreter_cases.py
"""

import pytest
import torch
from attention_cases import Case, assert_close, expected, ours

import flashtrain_kernels as fk
from flashtrain_kernels import dispatch
from flashtrain_kernels.dispatch import Tile

SMALL = Tile(32, 16, 4, 1)  # several tiles each way at small sizes
WIDE = Tile(16, 32, 4, 1)


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(monkeypatch):
    """Fill what the operators allocate with NaN, so that an element no kernel writes is seen."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


CASES = [
    Case(1, 1, 1, 1, 1, 16, causal=False),
    Case(1, 1, 65, 2, 1, 16, causal=True),
    Case(2, 63, 63, 2, 2, 16, causal=True),
    Case(1, 65, 65, 4, 2, 40, causal=False),
    Case(1, 63, 127, 3, 1, 16, causal=True),
    Case(1, 127, 63, 1, 1, 16, causal=True),
    Case(1, 65, 1, 2, 2, 16, causal=True),
    Case(1, 65, 65, 1, 1, 80, causal=True),
    Case(1, 17, 33, 1, 1, 1, causal=False),
    Case(1, 33, 33, 1, 1, 200, causal=True),
    Case(2, 120, 120, 2, 1, 16, causal=True, document_lengths=(20, 37, 1, 62)),
    Case(2, 120, 120, 2, 1, 16, causal=False, document_lengths=(20, 37, 1, 62)),
    Case(1, 64, 64, 1, 1, 16, causal=True, document_lengths=(64,)),
]
# The wide tile where the tiles' order matters: unequal lengths, heads in groups, documents.
TILED = [(case, SMALL) for case in CASES] + [(CASES[index], WIDE) for index in (4, 5, 10, 11)]


@pytest.mark.parametrize(("case", "tile"), TILED, ids=[f"{case}-{tile.block_q}x{tile.block_k}" for case, tile in TILED])
def test_outputs_and_every_gradient_equal_the_reference(case, tile):
    inputs = case.inputs(torch.float32)
    with dispatch.force("portable", tile):
        assert_close(ours(case, inputs), expected(case, inputs), 2e-5)


def test_a_thousand_tokens_with_the_default_tile():
    case = Case(1, 1000, 1000, 1, 1, 64, causal=True)
    inputs = case.inputs(torch.float32)
    assert_close(ours(case, inputs), expected(case, inputs), 2e-5)


def test_float16():
    case = Case(1, 65, 65, 2, 1, 64, causal=True)
    inputs = case.inputs(torch.float16)
    assert_close(ours(case, inputs), expected(case, inputs), 5e-3)


def test_bfloat16_is_refused_because_the_interpreter_multiplies_it_wrongly():
    x = torch.zeros(1, 8, 1, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="interpreter multiplies bfloat16 wrongly"):
        fk.flash_attn_func(x, x, x)


def test_rows_that_see_nothing_give_zero_minus_infinity_and_no_gradient():
    q, k, v = Case(1, 40, 8, 1, 1, 16, causal=True).inputs(torch.float32)
    with dispatch.force("portable", SMALL):
        out, lse = fk.flash_attn_func(q, k, v, causal=True, return_lse=True)
        (dq,) = torch.autograd.grad(out.sum(), q)
    assert out[:, :32].eq(0).all()
    assert lse[:, :, :32].eq(-torch.inf).all()
    assert dq[:, :32].eq(0).all()
    assert dq[:, 33:].ne(0).any()


@pytest.mark.parametrize("seqlen_k", [0, 5])
def test_empty_queries_or_keys(seqlen_k):
    seqlen_q = 5 - seqlen_k
    q = torch.randn(1, seqlen_q, 2, 16, requires_grad=True)
    k = torch.randn(1, seqlen_k, 2, 16, requires_grad=True)
    out, lse = fk.flash_attn_func(q, k, k, return_lse=True)
    assert out.shape == q.shape
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    dq, dk = torch.autograd.grad(out.sum(), (q, k))
    assert dq.eq(0).all()
    assert dk.eq(0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=["nan", "inf"])
def test_masked_keys_never_contribute_even_where_they_are_not_finite(bad):
    case = Case(1, 40, 40, 1, 1, 16, causal=True)
    clean = case.inputs(torch.float32)
    dirty = tuple(x.detach().clone() for x in clean)
    dirty[1][:, 30, :, 3] = bad
    dirty[2][:, 30, :, 5] = bad
    dirty = tuple(x.requires_grad_() for x in dirty)
    with dispatch.force("portable", SMALL):
        out = fk.flash_attn_func(*dirty, causal=True)
        wanted = fk.flash_attn_func(*clean, causal=True)
        got = torch.autograd.grad(out[:, :30].sum(), dirty)
    torch.testing.assert_close(out[:, :30], wanted[:, :30])
    assert not out[:, 30:].isfinite().all()
    assert got[0][:, :30].isfinite().all()


def test_one_document_that_is_not_finite_leaves_the_others_alone():
    case = Case(1, 60, 60, 2, 1, 16, causal=False, document_lengths=(25, 35))
    clean = case.inputs(torch.float32)
    dirty = tuple(x.detach().clone() for x in clean)
    for x in dirty:
        x[:, 40, :, 2] = torch.nan
    dirty = tuple(x.requires_grad_() for x in dirty)
    with dispatch.force("portable", SMALL):
        wanted, got = ours(case, clean, through_lse=False), ours(case, dirty, through_lse=False)
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(got[name][:, :25], wanted[name][:, :25])
        assert got[name][:, 25:].isnan().any()
    torch.testing.assert_close(got["lse"][:, :, :25], wanted["lse"][:, :, :25])


def test_a_visible_value_that_is_not_finite_spoils_only_its_own_column():
    case = Case(1, 20, 20, 1, 1, 16, causal=True)
    q, k, v = (x.detach().clone() for x in case.inputs(torch.float32))
    v[:, 10, :, 5] = torch.nan
    out = fk.flash_attn_func(q, k, v, causal=True)
    wanted = fk.reference.attention(q, k, v, causal=True)
    assert torch.equal(out.isnan(), wanted.isnan())
    torch.testing.assert_close(out, wanted, equal_nan=True)


def test_any_strides_are_taken_as_they_are():
    case = Case(2, 40, 40, 2, 2, 16, causal=True)
    inputs = case.inputs(torch.float32)
    strided = []
    for x in inputs:
        wide = torch.full((2, 2, 45, 48), torch.nan)  # (B, H, S, D) with room on every side
        wide[:, :, 3:43, 16:32] = x.detach().transpose(1, 2)
        strided.append(wide[:, :, 3:43, 16:32].transpose(1, 2).requires_grad_())
    last_not_contiguous = inputs[2].detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    with dispatch.force("portable", SMALL):
        wanted = ours(case, inputs)
        assert_close(ours(case, tuple(strided)), wanted, 1e-6)
        assert_close(ours(case, (inputs[0], inputs[1], last_not_contiguous)), wanted, 1e-6)


def test_an_expanded_output_gradient():
    inputs = Case(1, 20, 20, 2, 2, 16, causal=True).inputs(torch.float32)
    out = fk.flash_attn_func(*inputs, causal=True)
    expanded = torch.autograd.grad(out, inputs, torch.ones(()).expand_as(out), retain_graph=True)
    dense = torch.autograd.grad(out, inputs, torch.ones_like(out))
    for got, wanted in zip(expanded, dense, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("documents", [False, True])
def test_packed_equals_unpacked(documents):
    qkv = torch.randn(2, 40, 3, 2, 16, requires_grad=True)
    boundaries = fk.documents_from_ids(torch.tensor([[0] * 15 + [1] * 25] * 2)) if documents else None
    weight = torch.randn(2, 40, 2, 16)
    with dispatch.force("portable", SMALL):
        packed = fk.flash_attn_qkvpacked_func(qkv, causal=True, documents=boundaries)
        apart = fk.flash_attn_func(*qkv.unbind(2), causal=True, documents=boundaries)
        (got,) = torch.autograd.grad((packed * weight).sum(), qkv)
        (wanted,) = torch.autograd.grad((apart * weight).sum(), qkv)
    assert torch.equal(packed, apart)
    assert torch.equal(got, wanted)
    assert got.is_contiguous()


def test_softmax_scale():
    case = Case(1, 20, 20, 1, 1, 16, causal=False)
    inputs = case.inputs(torch.float32)
    got = fk.flash_attn_func(*inputs, softmax_scale=0.7)
    torch.testing.assert_close(got, fk.reference.attention(*inputs, softmax_scale=0.7))


def test_explain_names_the_interpreter_and_the_tile():
    x = torch.zeros(1, 8, 1, 16)
    assert "TRITON_INTERPRET=1" in fk.explain(x, x, x)
    assert "64x64" in fk.explain(x, x, x)
