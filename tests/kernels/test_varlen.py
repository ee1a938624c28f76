"""Sequences packed into one row: the same as each sequence alone, and what is said about
lengths that cannot be."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_formula import assert_same, cumulative, each_alone

import flashtrain_kernels as fk
from flashtrain_kernels import device_values, masks


def tensors(total_q, total_k, heads=4, kv_heads=2, head_dim=5):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(
            total, count, head_dim, generator=generator, dtype=torch.float64
        ).requires_grad_()
        for total, count in ((total_q, heads), (total_k, kv_heads), (total_k, kv_heads))
    ]


@settings(max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4),
    window=st.tuples(st.integers(-1, 4), st.integers(-1, 4)),
    causal=st.booleans(),
    softcap=st.sampled_from([0.0, 2.0]),
    slopes_of=st.sampled_from(["none", "head", "sequence"]),
    p=st.sampled_from([0.0, 0.4]),
    with_lse=st.booleans(),
)
def test_packed_sequences_equal_each_sequence_alone(
    lengths, window, causal, softcap, slopes_of, p, with_lse
):
    of_q, of_k = zip(*lengths, strict=True)
    cu_q, cu_k = cumulative(of_q), cumulative(of_k)
    inputs = tensors(sum(of_q), sum(of_k))
    slopes = {"none": None, "head": torch.rand(4), "sequence": torch.rand(len(lengths), 4)}[
        slopes_of
    ]
    options = {"dropout_p": p, "causal": causal, "window_size": window, "softcap": softcap}
    got = fk.flash_attn_varlen_func(
        *inputs,
        cu_q,
        cu_k,
        max(of_q),
        max(of_k),
        **options,
        alibi_slopes=slopes,
        dropout_seed=8,
        return_lse=with_lse,
    )
    wanted = each_alone(
        fk.flash_attn_func, *inputs, cu_q.tolist(), cu_k.tolist(), slopes, 8, **options
    )
    assert_same(got if with_lse else (got,), wanted if with_lse else wanted[:1], inputs)


def test_equal_lengths_equal_a_batch_dropout_included():
    q, k, v = tensors(12, 15)
    cu_q, cu_k = cumulative([4, 4, 4]), cumulative([5, 5, 5])
    bias = torch.randn(1, 4, 12, 15, dtype=torch.float64)
    options = {"causal": True, "dropout_seed": 2}
    packed = fk.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 5, 0.3, bias=bias, **options)
    batched_bias = torch.cat([bias[:, :, 4 * n : 4 * n + 4, 5 * n : 5 * n + 5] for n in range(3)])
    batch = (q.view(3, 4, 4, 5), k.view(3, 5, 2, 5), v.view(3, 5, 2, 5))
    torch.testing.assert_close(
        packed.view(3, 4, 4, 5), fk.flash_attn_func(*batch, 0.3, bias=batched_bias, **options)
    )


def test_the_probabilities_it_returns_are_those_of_each_sequence_padded():
    inputs, lengths = tensors(6, 8), [(2, 5), (4, 3)]
    cu_q, cu_k = cumulative([2, 4]), cumulative([5, 3])
    out, lse, none = fk.flash_attn_varlen_func(*inputs, cu_q, cu_k, 4, 5, return_attn_probs=True)
    assert (out.shape, lse.shape, none.shape) == ((6, 4, 5), (4, 6), (0,))
    shown = fk.flash_attn_varlen_func(
        *inputs, cu_q, cu_k, 4, 5, 0.5, dropout_seed=1, return_attn_probs=True
    )[2]
    assert shown.shape == (2, 4, 4, 5)
    for n, (of_q, of_k) in enumerate(lengths):
        q, k, v = (
            x[None, a : a + of]
            for x, a, of in zip(
                inputs, (cu_q[n], cu_k[n], cu_k[n]), (of_q, of_k, of_k), strict=True
            )
        )
        alone = fk.flash_attn_func(
            q, k, v, 0.5, dropout_seed=torch.tensor([1, n, 0]), return_attn_probs=True
        )[2]
        torch.testing.assert_close(shown[n, :, :of_q, :of_k], alone[0])
        assert shown[n, :, of_q:].eq(0).all()
        assert shown[n, :, :, of_k:].eq(0).all()


def test_a_mask_made_once_replaces_the_one_that_each_call_makes():
    inputs, cu = tensors(9, 9), cumulative([2, 3, 4])
    mask = masks.varlen(cu, cu, 9, 9, causal=True, window=(2, 0)).planned(5, torch.float64)
    got = fk.flash_attn_varlen_func(*inputs, cu, cu, 4, 4, mask=mask, return_lse=True)
    assert_same(
        got,
        fk.flash_attn_varlen_func(*inputs, cu, cu, 4, 4, 0.0, None, True, (2, -1), return_lse=True),
        inputs,
    )


def test_a_device_tensor_is_read_once_until_it_is_written():
    reads = []

    def summary(x):
        reads.append(1)
        return x.amax()

    cu = cumulative([3, 4])
    for _ in range(3):
        assert device_values.read_once(cu, summary) == (7,)
    assert len(reads) == 1
    cu[2] = 9
    assert device_values.read_once(cu, summary) == (9,)
    assert device_values.read_once(cu.clone(), summary) == (9,)
    assert len(reads) == 3
    with torch.inference_mode():
        unversioned = cumulative([3, 4])
        for _ in range(2):
            assert device_values.read_once(unversioned, summary) == (7,)
    assert len(reads) == 5


def test_tensors_without_data_are_not_read():
    assert (
        device_values.values_of(torch.zeros(3, dtype=torch.int32, device="meta"), torch.amax)
        is None
    )


X = torch.zeros(7, 2, 8)
CU = cumulative([3, 4])
LATER, PAGES = cumulative([3, 5]), torch.zeros(2, 1).int()
MISTAKES = [
    ("q", {"q": X[None]}, ValueError),
    ("k and v", {"k": X[:5]}, ValueError),
    ("cu_seqlens_q", {"cu_seqlens_q": [0, 3, 7]}, TypeError),
    ("cu_seqlens_k", {"cu_seqlens_k": CU.long()}, TypeError),
    ("cu_seqlens_q", {"cu_seqlens_q": CU[None]}, ValueError),
    ("cu_seqlens_q", {"cu_seqlens_q": CU[:1]}, ValueError),
    ("cu_seqlens_k", {"cu_seqlens_k": CU.to("meta")}, ValueError),
    ("cu_seqlens_q must start", {"cu_seqlens_q": CU + 1}, ValueError),
    ("cu_seqlens_k must not decrease", {"cu_seqlens_k": cumulative([5, -2, 4])}, ValueError),
    ("cu_seqlens_k must end", {"cu_seqlens_k": LATER}, ValueError),
    ("cu_seqlens_q and cu_seqlens_k", {"cu_seqlens_k": cumulative([3, 3, 1])}, ValueError),
    ("max_seqlen_q", {"max_seqlen_q": 3}, ValueError),
    ("max_seqlen_k", {"max_seqlen_k": torch.tensor(3)}, ValueError),
    ("max_seqlen_k", {"max_seqlen_k": torch.tensor(4.0)}, TypeError),
    ("max_seqlen_q", {"max_seqlen_q": 4.0}, TypeError),
    ("max_seqlen_q", {"max_seqlen_q": -4}, ValueError),
    ("block_table", {"block_table": torch.zeros(1)}, TypeError),
    ("block_table", {"block_table": torch.zeros(1).int()}, ValueError),
    ("k", {"block_table": PAGES}, ValueError),
    ("cu_seqlens_k must end", {"block_table": PAGES, "k": X[:, None], "v": X[:, None]}, ValueError),
    ("causal", {"causal": 1}, TypeError),
    ("window_size", {"window_size": (-2, 0)}, ValueError),
    ("alibi_slopes", {"alibi_slopes": torch.ones(3, 2)}, ValueError),
    ("bias", {"bias": torch.zeros(2, 1, 1, 7)}, ValueError),
    ("mask.queries", {"mask": masks.varlen(CU, CU, 6, 7)}, ValueError),
    ("mask must hold causal", {"mask": masks.varlen(CU, CU, 7, 7), "causal": True}, ValueError),
]


@pytest.mark.parametrize(("named", "changes", "error"), MISTAKES)
def test_a_mistake_is_named(named, changes, error):
    arguments = {
        "q": X, "k": X, "v": X, "cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 4,
        "max_seqlen_k": 4, **changes
    }  # fmt: skip
    with pytest.raises(error, match=f"^{named}"):
        fk.flash_attn_varlen_func(**arguments)


def test_mistakes_of_the_packed_functions():
    for named, qkv, longest in (("qkv", X, 4), ("max_seqlen", torch.zeros(7, 3, 2, 8), 2),
                                ("cu_seqlens", torch.zeros(6, 3, 2, 8), 4)):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{named} must"):
            fk.flash_attn_varlen_qkvpacked_func(qkv, CU, longest)
    with pytest.raises(ValueError, match=r"^kv must"):
        fk.flash_attn_varlen_kvpacked_func(X, X, CU, CU, 4, 4)
