"""flash_attn_func and its packed forms on a CPU: every feature alone and with every other."""

import inspect
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_formula import assert_same, plain_attention, tensors, window_pairs

import flashtrain_kernels as fk
from flashtrain_kernels import dispatch, masks

# flash-attn 2.8's parameters after the tensors, in their order.
FLASH_ATTN = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
}  # fmt: skip
OURS = {
    "bias": None,
    "mask": None,
    "dropout_seed": None,
    "return_lse": False,
    "learnable_sink": None,
}


def kept_pairs(q, k, v, p, seed, **options):
    """Which weights dropout keeps, as S_dmask shows."""
    probabilities = fk.flash_attn_func(
        q, k, v, p, dropout_seed=seed, return_attn_probs=True, **options
    )[2]
    return ~probabilities.signbit()


# --- features, alone and in pairs -----------------------------------------------------------------
BIAS = torch.randn(1, 4, 6, 9, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
BIAS[0, 1, 2, 3] = -torch.inf
SINK = torch.tensor([0.3, -2.0, 5.0, -torch.inf], dtype=torch.float64)
IDS = torch.tensor([[0, 0, 0, 1, 1, 2]])
# Each as the call's options and as the textbook's.
FEATURES = {
    "causal": ({"causal": True}, {"seen": window_pairs(6, 9, causal=True)}),
    "window": ({"window_size": (3, 1)}, {"seen": window_pairs(6, 9, 3, 1)}),
    "scale": ({"softmax_scale": 0.7}, {"scale": 0.7}),
    "softcap": ({"softcap": 1.3}, {"softcap": 1.3}),
    "alibi": ({"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])},) * 2,
    "alibi a row": ({"alibi_slopes": torch.arange(8).reshape(2, 4) / 7},) * 2,
    "bias": ({"bias": BIAS}, {"bias": BIAS}),
    "dropout": ({"dropout_p": 0.4, "dropout_seed": 11}, {"p": 0.4}),
    "sinks": ({"learnable_sink": SINK}, {"sink": SINK}),
    "mask": ({"mask": masks.sliding_window(9, (2, 1)).select(torch.arange(3, 9), torch.arange(9))},
             {"seen": window_pairs(6, 9, 2, 1)}),
}  # fmt: skip
EXCLUDE = {("causal", "mask"), ("window", "mask"), ("alibi", "alibi a row")}
PAIRS = [
    pair for pair in itertools.combinations_with_replacement(FEATURES, 2) if pair not in EXCLUDE
]


@pytest.mark.parametrize("names", PAIRS, ids=" + ".join)
@pytest.mark.parametrize("with_lse", [True, False], ids=["reference", "torch"])
def test_every_feature_and_every_pair_of_features(names, with_lse):
    inputs = tensors()
    options, formula = {}, {}
    for name in names:
        options |= FEATURES[name][0]
        plain = dict(FEATURES[name][1])
        if "alibi_slopes" in plain:
            plain = {"slopes": plain["alibi_slopes"]}
        if "seen" in plain and "seen" in formula:
            plain["seen"] = plain["seen"] & formula["seen"]
        formula |= plain
    if "bias" in options:
        options["bias"] = formula["bias"] = BIAS.clone().requires_grad_()
        inputs = (*inputs, options["bias"])
    if "learnable_sink" in options:
        options["learnable_sink"] = formula["sink"] = SINK.clone().requires_grad_()
        inputs = (*inputs, options["learnable_sink"])
    if "dropout_p" in options:
        generator = {"p": 0.4, "seed": 11}
        masked = {"mask": options["mask"]} if "mask" in options else {}
        formula["kept"] = kept_pairs(*inputs[:3], **generator, **masked)
    if names == ("causal", "window"):  # causal bounds the window to the right
        formula["seen"] = window_pairs(6, 9, 3, 0)
    out = fk.flash_attn_func(*inputs[:3], **options, return_lse=with_lse)
    wanted = plain_attention(*inputs[:3], **formula)
    assert_same(out if with_lse else (out,), wanted if with_lse else wanted[:1], inputs)


@settings(max_examples=60)
@given(
    seqlen_q=st.integers(0, 7),
    seqlen_k=st.integers(1, 7),
    head_dim=st.integers(1, 9),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1), (6, 2)]),
    window=st.tuples(st.integers(-1, 7), st.integers(-1, 7)),
    causal=st.booleans(),
    with_lse=st.booleans(),
    sinks=st.booleans(),
)
def test_any_lengths_heads_windows_and_sinks(
    seqlen_q, seqlen_k, head_dim, heads, window, causal, with_lse, sinks
):
    inputs = tensors(1, seqlen_q, seqlen_k, *heads, head_dim)
    sink = torch.randn(heads[0], dtype=torch.float64, requires_grad=True) if sinks else None
    options = {"causal": causal, "window_size": window, "learnable_sink": sink}
    got = fk.flash_attn_func(*inputs, **options, return_lse=with_lse)
    wanted = plain_attention(
        *inputs, seen=window_pairs(seqlen_q, seqlen_k, *window, causal), sink=sink
    )
    inputs = (*inputs, sink) if sinks else inputs
    assert_same(got if with_lse else (got,), wanted if with_lse else wanted[:1], inputs)


# --- flash-attn's own words -----------------------------------------------------------------------


def seen_by(seqlen_q, seqlen_k, **options):
    """Which keys move each query's output: the mask, seen from outside."""
    q = torch.zeros(1, seqlen_q, 1, 8)
    v = torch.eye(seqlen_k, 8)[None, :, None]
    return (fk.flash_attn_func(q, v, v, **options)[0, :, 0, :seqlen_k] > 0).int().tolist()


def test_windows_are_inclusive_and_all_is_aligned_as_its_docstring_says():
    assert seen_by(2, 5, causal=True) == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert seen_by(5, 2, causal=True) == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]
    assert seen_by(4, 4, window_size=(1, 0)) == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]
    assert seen_by(2, 5, window_size=(1, 1)) == [[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]
    assert seen_by(2, 5, window_size=(-1, 0)) == seen_by(2, 5, causal=True)
    assert seen_by(3, 3, window_size=(1, 2), causal=True) == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert seen_by(3, 3, window_size=[-1, 1]) == [[1, 1, 0], [1, 1, 1], [1, 1, 1]]


LENGTHS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
KVCACHE = {
    "k": None, "v": None, "rotary_cos": None, "rotary_sin": None, "cache_seqlens": None,
    "cache_batch_idx": None,
    "cache_leftpad": None, "block_table": None, "softmax_scale": None, "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0, "rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0,
    "return_softmax_lse": False,
}  # fmt: skip
TORCHS = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}
SIGNATURES = [
    (fk.flash_attn_func, ["q", "k", "v"], FLASH_ATTN, OURS),
    (fk.flash_attn_kvpacked_func, ["q", "kv"], FLASH_ATTN, OURS),
    (fk.flash_attn_qkvpacked_func, ["qkv"], FLASH_ATTN, OURS),
    (
        fk.flash_attn_varlen_func,
        ["q", "k", "v", *LENGTHS],
        {**FLASH_ATTN, "block_table": None},
        OURS,
    ),
    (fk.flash_attn_varlen_kvpacked_func, ["q", "kv", *LENGTHS], FLASH_ATTN, OURS),
    (fk.flash_attn_varlen_qkvpacked_func, ["qkv", "cu_seqlens", "max_seqlen"], FLASH_ATTN, OURS),
    (fk.flash_attn_with_kvcache, ["q", "k_cache", "v_cache"], KVCACHE, {"learnable_sink": None}),
    (fk.scaled_dot_product_attention, ["query", "key", "value"], TORCHS, {}),
]


@pytest.mark.parametrize(("function", "first", "named", "ours"), SIGNATURES)
def test_parameters_and_defaults_are_flash_attns_and_torchs_and_ours_come_by_keyword(
    function, first, named, ours
):
    parameters = inspect.signature(function).parameters.values()
    by_place = {p.name: p.default for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD}
    assert list(by_place)[: len(first)] == first
    assert list(by_place.items())[len(first) :] == list(named.items())
    assert {p.name: p.default for p in parameters if p.kind == p.KEYWORD_ONLY} == ours


def test_what_return_attn_probs_returns():
    q, k, v = tensors()
    out, lse, probabilities = fk.flash_attn_func(q, k, v, return_attn_probs=True)
    assert (lse.shape, probabilities.shape, probabilities.dtype) == ((2, 4, 6), (0,), q.dtype)
    out, lse, probabilities = fk.flash_attn_func(
        q, k, v, 0.5, causal=True, return_attn_probs=True, return_lse=True
    )
    assert probabilities.shape == (2, 4, 6, 9)
    torch.testing.assert_close(probabilities.abs().sum(-1), torch.ones(2, 4, 6).double())
    values = v.repeat_interleave(2, 2).transpose(1, 2)
    torch.testing.assert_close((probabilities.clamp(min=0) * 2 @ values).transpose(1, 2), out)
    assert probabilities[..., 0, 4:].eq(0).all()


def test_a_query_that_sees_nothing_has_the_sinks_log_sum_exp_and_gives_its_gradient_to_it():
    inputs = tensors(seqlen_q=9, seqlen_k=4)
    sink = SINK.clone().requires_grad_()
    out, lse = fk.flash_attn_func(*inputs, causal=True, learnable_sink=sink, return_lse=True)
    assert out[:, :5].eq(0).all()
    assert torch.equal(lse[:, :, :5], sink[:, None].expand(2, 4, 5))
    gradients = torch.autograd.grad(lse[:, :, :5].sum(), (*inputs, sink))
    assert [x.abs().sum().item() for x in gradients] == [0, 0, 0, 40]
    same = fk.flash_attn_func(
        *inputs, causal=True, learnable_sink=torch.full((4,), -torch.inf).double()
    )
    assert torch.equal(same, fk.flash_attn_func(*inputs, causal=True, return_lse=True)[0])


def test_the_probabilities_of_a_call_with_sinks_sum_to_what_the_sinks_leave():
    q, k, v = tensors()
    _, lse, shown = fk.flash_attn_func(q, k, v, 0.5, learnable_sink=SINK, return_attn_probs=True)
    torch.testing.assert_close(shown.abs().sum(-1), 1 - torch.exp(SINK[:, None] - lse))


# --- packed tensors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "softcap": 2.0},
        {"dropout_p": 0.3, "dropout_seed": 4},
        {"learnable_sink": SINK},
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_packed_equals_unpacked(options, implementation):
    q = torch.randn(2, 7, 4, 6, dtype=torch.float64, requires_grad=True)
    kv = torch.randn(2, 5, 2, 2, 6, dtype=torch.float64, requires_grad=True)
    qkv = torch.randn(2, 5, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    with dispatch.force(implementation):
        got = fk.flash_attn_kvpacked_func(q, kv, **options, return_lse=True)
        assert_same(got, fk.flash_attn_func(q, *kv.unbind(2), **options, return_lse=True), (q, kv))
        got = fk.flash_attn_qkvpacked_func(qkv, **options)
        assert_same((got,), (fk.flash_attn_func(*qkv.unbind(2), **options),), (qkv,))
        shown = fk.flash_attn_qkvpacked_func(qkv, 0.5, dropout_seed=1, return_attn_probs=True)[2]
        assert torch.equal(
            shown,
            fk.flash_attn_func(*qkv.unbind(2), 0.5, dropout_seed=1, return_attn_probs=True)[2],
        )
