"""The Triton kernels on a CPU, in Triton's interpreter, against the float64 reference:
outputs and every gradient.

Triton decides when it is imported whether to interpret, and then for the whole process. So
these tests are no part of the ordinary collection: test_portable.py runs this file in a
process of its own. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreter_cases.py
"""

import pytest
import torch
from attention_cases import (
    BANDS,
    BLOCKS,
    MASKS,
    Case,
    assert_close,
    case_of,
    expected,
    ours,
    pairwise,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_formula import cumulative, each_alone

import flashtrain_kernels as fk
from flashtrain_kernels import dispatch
from flashtrain_kernels.backends.portable.tile_table import Tile

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


# --- shapes ---------------------------------------------------------------------------------------
SHAPES = [
    Case(1, 1, 1, 1, 1, 16), Case(1, 1, 65, 2, 1, 16, "causal"),
    Case(2, 63, 63, 2, 2, 16, "causal"),
    Case(1, 63, 127, 3, 1, 16, "causal"), Case(1, 127, 63, 1, 1, 16, "causal"),
    Case(1, 127, 63, 1, 1, 16, "window"),
    Case(1, 65, 1, 2, 2, 16, "causal"), Case(1, 65, 65, 1, 1, 80, "causal"),
    Case(1, 17, 33, 1, 1, 1),
    Case(1, 33, 33, 1, 1, 200, "causal"), Case(1, 35, 33, 2, 1, 512, "causal"),
    Case(1, 33, 33, 1, 1, 320, "window"), Case(1, 33, 40, 2, 1, 24, "causal", value_dim=9),
    Case(1, 33, 33, 2, 2, 192, "causal", value_dim=128),
    Case(1, 20, 33, 1, 1, 512, value_dim=300),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tile", "together"), [(SMALL, True), (WIDE, False)], ids=["32x16", "16x32"]
)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_any_shape(case, tile, together):
    inputs = case.inputs(torch.float32)
    with dispatch.force("portable", tile, together):
        assert_close(ours(case, inputs), expected(case, inputs), 2e-5)


@settings(max_examples=12, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    seqlen_q=st.integers(1, 70),
    seqlen_k=st.integers(1, 70),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    head_dim=st.integers(1, 48),
    mask=st.sampled_from(BANDS),
    softcap=st.sampled_from([0.0, 3.0]),
)
def test_any_lengths_and_head_dimension(seqlen_q, seqlen_k, heads, head_dim, mask, softcap):
    case = Case(1, seqlen_q, seqlen_k, *heads, head_dim, mask, softcap)
    inputs = case.inputs(torch.float32)
    with dispatch.force("portable", SMALL):
        assert_close(ours(case, inputs), expected(case, inputs), 5e-5)


@pytest.mark.parametrize(
    ("case", "dtype", "tolerance"),
    [
        (Case(1, 1000, 1000, 1, 1, 64, "causal"), torch.float32, 2e-5),
        (Case(1, 65, 65, 2, 1, 64, "causal"), torch.float16, 5e-3),
    ],
    ids=["a thousand tokens", "float16"],
)
def test_the_default_tile(case, dtype, tolerance):
    inputs = case.inputs(dtype)
    assert_close(ours(case, inputs), expected(case, inputs), tolerance)


def test_bfloat16_is_refused_because_the_interpreter_multiplies_it_wrongly():
    x = torch.zeros(1, 8, 1, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="interpreter multiplies bfloat16 wrongly"):
        fk.flash_attn_func(x, x, x)


WIDE_HEADS = [
    {"mask": "causal document"}, {"mask": "shuffled", "softcap": 3.0, "heads": (2, 1)},
    {"mask": "window causal", "dropout": 0.3}, {"bias": (1, 0, 1, 0), "alibi": "alibi"},
    {"mask": "blocks causal"},
]  # fmt: skip


@pytest.mark.parametrize("factors", WIDE_HEADS, ids=str)
def test_heads_of_512_with_a_launch_for_each_gradient(factors):
    case = case_of({"head_dim": 512, **factors}, 45, 37, 45, heads=(2, 1), head_dim=512)
    inputs = case.inputs(torch.float32)
    with dispatch.force("portable", SMALL):
        assert_close(ours(case, inputs), expected(case, inputs), 5e-5)


# --- features, each alone and every two of them together ------------------------------------------
FACTORS = {
    "mask": [*BANDS, *MASKS, *BLOCKS],
    "softcap": [0.0, 3.0],
    "alibi": ["", "alibi", "alibi_rows"],
    "bias": [None, (0, 0, 0, 0), (1, 0, 1, 0), (0, 1, 0, 1)],
    "dropout": [0.0, 0.3],
    "heads": [(2, 2), (4, 2), (3, 1)],
    "head_dim": [16, 24],
    "tile": [SMALL, WIDE],
}
ALONE = [{"mask": mask} for mask in (*MASKS, *BLOCKS, "window", "window causal")]
ALONE += [
    {"softcap": 3.0},
    {"alibi": "alibi"},
    {"alibi": "alibi_rows"},
    {"dropout": 0.3},
    {"bias": (1, 1, 1, 1)},
]
ALONE += [{"bias": bias} for bias in FACTORS["bias"] if bias is not None]
TOGETHER = pairwise(FACTORS)


def feature_case(factors: dict) -> Case:
    return case_of(factors, 45, 37, 45, heads=(2, 1), head_dim=16)


@pytest.mark.parametrize("factors", ALONE, ids=lambda factors: str(feature_case(factors)))
def test_every_feature_with_the_backward_in_two_launches(factors):
    case = feature_case(factors)
    inputs = case.inputs(torch.float32)
    with dispatch.force("portable", factors.get("tile", SMALL), together=False):
        assert_close(ours(case, inputs), expected(case, inputs), 5e-5)


@pytest.mark.parametrize("factors", TOGETHER, ids=lambda factors: str(feature_case(factors)))
def test_every_two_values_together_with_the_backward_in_one_launch(factors):
    case = feature_case(factors)
    inputs = case.inputs(torch.float32)
    with dispatch.force("portable", factors.get("tile", SMALL)):
        assert_close(ours(case, inputs), expected(case, inputs), 5e-5)


# --- varlen ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize(
    ("causal", "window"), [(True, (-1, -1)), (False, (-1, -1)), (False, (5, 2))]
)
def test_packed_sequences_equal_the_same_sequences_one_by_one(causal, window, dropout):
    cu_q, cu_k = cumulative([7, 0, 30, 1, 12]), cumulative([9, 4, 30, 17, 5])
    inputs = [
        torch.randn(int(cu[-1]), n, 16, requires_grad=True)
        for cu, n in ((cu_q, 4), (cu_k, 2), (cu_k, 2))
    ]
    slopes, options = (
        torch.rand(5, 4),
        {"dropout_p": dropout, "causal": causal, "window_size": window},
    )
    with dispatch.force("portable", SMALL):
        out, lse, _ = fk.flash_attn_varlen_func(
            *inputs,
            cu_q,
            cu_k,
            30,
            30,
            alibi_slopes=slopes,
            dropout_seed=99,
            return_attn_probs=True,
            **options,
        )
    weight = torch.randn_like(out)
    got = torch.autograd.grad((out * weight).sum(), inputs)
    wanted, wanted_lse = each_alone(
        fk.reference.attention, *inputs, cu_q, cu_k, slopes, 99, **options
    )
    gradients = torch.autograd.grad((wanted * weight).sum(), inputs)
    torch.testing.assert_close(
        (out, lse, *got), (wanted, wanted_lse, *gradients), atol=2e-5, rtol=2e-5
    )


# --- dropout draws the same whatever computes it --------------------------------------------------
def test_dropout_is_the_same_for_a_part_of_the_queries_keys_heads_and_batch():
    case = Case(3, 40, 40, 4, 4, 16, "causal", dropout=0.5)
    q, k, v = (x.detach() for x in case.inputs(torch.float32))
    seed = torch.tensor([5, 0, 0])
    with dispatch.force("portable", SMALL):
        whole = fk.flash_attn_func(q, k, v, 0.5, causal=True, dropout_seed=seed)
        rows = fk.flash_attn_func(
            q[2:], k[2:], v[2:], 0.5, causal=True, dropout_seed=torch.tensor([5, 2, 0])
        )
        heads = fk.flash_attn_func(
            q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], 0.5, causal=True,
            dropout_seed=torch.tensor([5, 0, 3])
        )  # fmt: skip
        late = fk.flash_attn_func(q[:, 30:], k, v, 0.5, causal=True, dropout_seed=seed)
        partials = []
        for half in (slice(0, 20), slice(20, 40)):
            index = torch.arange(40)
            mask = fk.masks.causal(40).select(index, index[half])
            partials.append(
                fk.flash_attn_func(
                    q[:1],
                    k[:1, half],
                    v[:1, half],
                    0.5,
                    mask=mask,
                    dropout_seed=seed,
                    return_lse=True,
                )
            )
    torch.testing.assert_close(rows[0], whole[2])
    torch.testing.assert_close(heads[:, :, 0], whole[:, :, 3])
    torch.testing.assert_close(late, whole[:, 30:])
    torch.testing.assert_close(fk.merge_attention(partials)[0][0], whole[0])


# --- rows that see nothing, and numbers that are not finite ---------------------------------------
def test_a_bias_of_minus_infinity_hides_whole_rows_without_nan():
    case = Case(1, 20, 20, 1, 1, 16, bias=(1, 1, 0, 0))
    inputs = case.inputs(torch.float32)
    with torch.no_grad():
        inputs[3][:, :, 4] = -torch.inf
        inputs[3][:, :, 5:, 2] = -torch.inf
    with dispatch.force("portable", SMALL):
        got = ours(case, inputs)
    assert got["out"][:, 4].eq(0).all()
    assert got["lse"][:, :, 4].eq(-torch.inf).all()
    assert got["dq"][:, 4].eq(0).all()
    assert got["dbias"][:, :, 4].eq(0).all()
    assert_close(got, expected(case, inputs), 2e-5)


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
@pytest.mark.parametrize(
    "mask", ["causal", "window causal", "blocks causal", "shuffled", "global window"]
)
def test_masked_keys_never_contribute_and_visible_ones_do_even_where_they_are_not_finite(mask, bad):
    case = Case(1, 40, 40, 1, 1, 16, mask)
    clean = case.inputs(torch.float32)
    dirty = [x.detach().clone() for x in clean]
    dirty[1][:, 20, :, 3] = bad
    dirty[2][:, 20, :, 5] = bad
    dirty = [x.requires_grad_() for x in dirty]
    exact = [x.detach().double() for x in clean]
    exact[2][:, 20] = torch.nan  # the reference only says who sees the key
    sees = fk.reference.attention(*exact, **case.options()).isnan().any(-1)[0, :, 0]
    assert sees.any()
    assert (~sees).any()
    options = case.options()
    with dispatch.force("portable", SMALL):
        out, wanted = fk.flash_attn_func(*dirty, **options), fk.flash_attn_func(*clean, **options)
        got = torch.autograd.grad(out[:, ~sees].sum(), dirty)
        want = torch.autograd.grad(wanted[:, ~sees].sum(), clean)
    torch.testing.assert_close(out[:, ~sees], wanted[:, ~sees])
    assert not out[:, sees].isfinite().all()
    torch.testing.assert_close(got[0][:, ~sees], want[0][:, ~sees])


# --- sinks ----------------------------------------------------------------------------------------
SINKS = [
    Case(2, 37, 45, 4, 2, 16, "causal", sinks=True), Case(1, 40, 8, 3, 1, 16, "causal", sinks=True),
    Case(2, 45, 45, 2, 1, 24, "window", softcap=3.0, sinks=True),
    Case(2, 45, 45, 2, 2, 16, "causal document", dropout=0.3, sinks=True),
    Case(1, 37, 45, 4, 4, 16, "blocks", alibi="alibi", bias=(1, 0, 0, 0), sinks=True),
]  # fmt: skip


@pytest.mark.parametrize("case", SINKS, ids=str)
def test_every_feature_with_sinks(case):
    inputs = case.inputs(torch.float32)
    with dispatch.force("portable", SMALL):
        assert_close(ours(case, inputs), expected(case, inputs), 5e-5)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 1, 8), (2, 130, 67, 4, 2, 72), (1, 3, 200, 5, 5, 1)], ids=str
)
@pytest.mark.parametrize("through", ["both", "out", "lse"])
def test_the_sinks_kernels_at_any_shape_again_and_again_and_through_one_output_alone(
    shape, through
):
    case = Case(*shape, "causal", sinks=True)
    inputs = case.inputs(torch.float32)
    # Of rows that see nothing the reference has no gradient then.
    if case.seqlen_q <= case.seqlen_k:
        with torch.no_grad():
            inputs[3][0] = -torch.inf
    weight = torch.randn(case.batch, case.seqlen_q, case.heads, case.head_dim, dtype=torch.float64)

    def gradients(attention, tensors):
        *qkv, sink = tensors
        out, lse = attention(*qkv, causal=True, learnable_sink=sink, return_lse=True)
        finite = torch.where(lse.isfinite(), lse, 0.0)
        parts = {"out": (out * weight.to(out.dtype)).sum(), "lse": (finite * finite).sum()}
        loss = parts["out"] + parts["lse"] if through == "both" else parts[through]
        return torch.autograd.grad(loss, tensors, allow_unused=True)

    wanted = gradients(
        fk.reference.attention, [x.detach().double().requires_grad_() for x in inputs]
    )
    for _ in range(4):  # as it comes, recorded, replayed
        for got, exact in zip(gradients(fk.flash_attn_func, inputs), wanted, strict=True):
            got, exact = (torch.zeros(()) if x is None else x for x in (got, exact))
            torch.testing.assert_close(
                *torch.broadcast_tensors(got.double(), exact.double()), atol=5e-5, rtol=5e-5
            )


def test_one_sink_of_all_heads_is_an_expanded_number_and_one_of_minus_infinity_is_none():
    inputs = Case(2, 33, 40, 4, 2, 16, "causal").inputs(torch.float32)
    one = torch.tensor(0.7).expand(4)
    same = fk.flash_attn_func(*inputs, causal=True, learnable_sink=one)
    assert torch.equal(
        same, fk.flash_attn_func(*inputs, causal=True, learnable_sink=one.contiguous())
    )
    none = fk.flash_attn_func(*inputs, causal=True, learnable_sink=torch.full((4,), -torch.inf))
    assert torch.equal(none, fk.flash_attn_func(*inputs, causal=True))


def test_a_call_with_sinks_has_first_derivatives_in_a_graph_and_no_second():
    inputs = Case(1, 20, 20, 2, 2, 16, sinks=True).inputs(torch.float32)
    out = fk.flash_attn_func(*inputs[:3], causal=True, learnable_sink=inputs[3])
    plain = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    kept = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    for one, other in zip(plain, kept, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(kept[3].sum(), inputs)


# --- memory layout --------------------------------------------------------------------------------
def test_any_strides():
    case = Case(2, 33, 33, 2, 2, 16, "causal")
    inputs = case.inputs(torch.float32)
    heads_first = [
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs
    ]
    last_not_contiguous = (
        inputs[2].detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    )
    with dispatch.force("portable", SMALL):
        wanted = ours(case, inputs)
        assert_close(ours(case, heads_first), wanted, 1e-6)
        assert_close(ours(case, [inputs[0], inputs[1], last_not_contiguous]), wanted, 1e-6)


def test_an_expanded_output_gradient():
    inputs = Case(1, 20, 20, 2, 2, 16).inputs(torch.float32)
    out = fk.flash_attn_func(*inputs, causal=True)
    expanded = torch.autograd.grad(out, inputs, torch.ones(()).expand_as(out), retain_graph=True)
    dense = torch.autograd.grad(out, inputs, torch.ones_like(out))
    for got, wanted in zip(expanded, dense, strict=True):
        assert torch.equal(got, wanted)


def test_explain_names_the_interpreter_and_the_tile():
    x = torch.zeros(1, 8, 1, 16)
    assert "TRITON_INTERPRET=1" in fk.explain(x, x, x)
    assert "64x64" in fk.explain(x, x, x)
