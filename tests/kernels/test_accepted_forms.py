"""What programs written for flash-attn and for torch's attention pass: numbers in any form,
tensors under autocast."""

import numpy as np
import pytest
import torch
from plain_formula import tensors
from torch.nn.functional import scaled_dot_product_attention

import flashtrain_kernels as fk
from flashtrain_kernels import dispatch

CU = torch.tensor([0, 3, 7], dtype=torch.int32)
WINDOWS = [
    (2, 1), [2, 1], torch.tensor([2, 1]), torch.tensor([2, 1], dtype=torch.int32),
    np.array([2, 1]).tolist(),
    tuple(np.array([2, 1])), (torch.tensor(2), 1),
]  # fmt: skip


def packed():
    return [torch.randn(7, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]


@pytest.mark.parametrize("window", WINDOWS, ids=repr)
def test_a_window_is_two_integers_in_any_form(window):
    q, k, v = tensors()
    wanted = fk.flash_attn_func(q, k, v, window_size=(2, 1))
    assert torch.equal(fk.flash_attn_func(q, k, v, window_size=window), wanted)
    q, k, v = packed()
    wanted = fk.flash_attn_varlen_func(q, k, v, CU, CU, 4, 4, window_size=(2, 1))
    assert torch.equal(fk.flash_attn_varlen_func(q, k, v, CU, CU, 4, 4, window_size=window), wanted)
    assert "window (2, 1)" in fk.explain(*tensors(), window_size=window)


def test_no_bound_may_be_none_as_flash_attn_4_has_it():
    q, k, v = tensors()
    assert torch.equal(
        fk.flash_attn_func(q, k, v, window_size=(None, None)), fk.flash_attn_func(q, k, v)
    )
    wanted = fk.flash_attn_func(q, k, v, window_size=(3, -1))
    assert torch.equal(fk.flash_attn_func(q, k, v, window_size=(3, None)), wanted)


@pytest.mark.parametrize(
    "longest", [4, np.int64(4), torch.tensor(4), torch.tensor([4], dtype=torch.int32)], ids=repr
)
def test_the_longest_length_may_be_a_tensor_as_transformers_has_it(longest):
    q, k, v = packed()
    options = {"dropout_p": 0.3, "dropout_seed": 3, "return_attn_probs": True}
    wanted = fk.flash_attn_varlen_func(q, k, v, CU, CU, 4, 4, **options)
    for one, other in zip(
        fk.flash_attn_varlen_func(q, k, v, CU, CU, longest, longest, **options), wanted, strict=True
    ):
        assert torch.equal(one, other)


def test_the_longest_length_as_a_tensor_under_torch_compile():
    def attend(q, k, v, cu, longest):
        return fk.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True)

    q, k, v = packed()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, CU, torch.tensor(4)), attend(q, k, v, CU, 4))


# --- autocast: as torch's own attention -----------------------------------------------------------
# What is given, and what torch computes in under autocast to bfloat16.
DTYPES = {
    torch.float32: torch.bfloat16,
    torch.float16: torch.bfloat16,
    torch.float64: torch.float64,
}


def called(function, q, k, v):
    """out of one function, (B, S, H, D)."""
    one = (
        (q, k, v) if k.shape[2] == q.shape[2] else (q, *(x.repeat_interleave(2, 2) for x in (k, v)))
    )
    with torch.autocast("cpu", enabled=False):  # under which torch.stack takes no float16
        kv, qkv = torch.stack((k, v), 2), torch.stack(one, 2)
    length = q.shape[1]
    cu = torch.tensor([0, length], dtype=torch.int32)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    return {
        "func": lambda: fk.flash_attn_func(q, k, v),
        "kvpacked": lambda: fk.flash_attn_kvpacked_func(q, kv),
        "qkvpacked": lambda: fk.flash_attn_qkvpacked_func(qkv),
        "varlen": lambda: fk.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, length, length)[None],
        "varlen kvpacked": lambda: fk.flash_attn_varlen_kvpacked_func(
            q[0], kv[0], cu, cu, length, length
        )[None],
        "varlen qkvpacked": lambda: fk.flash_attn_varlen_qkvpacked_func(qkv[0], cu, length)[None],
        "sdpa": lambda: fk.scaled_dot_product_attention(*heads_first, enable_gqa=True).transpose(
            1, 2
        ),
    }[function]()


FUNCTIONS = [
    "func",
    "kvpacked",
    "qkvpacked",
    "varlen",
    "varlen kvpacked",
    "varlen qkvpacked",
    "sdpa",
]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_computes_in_its_dtype_and_gradients_are_in_the_inputs(function, dtype):
    inputs = tensors(batch=1, seqlen_q=6, seqlen_k=6, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = called(function, *inputs)
        torchs = scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in inputs), enable_gqa=True
        ).transpose(1, 2)
    assert out.dtype == torchs.dtype == DTYPES[dtype]
    torch.testing.assert_close(out, torchs, atol=2e-2, rtol=2e-2)
    gradients = torch.autograd.grad(out.square().sum(), inputs)
    assert [x.dtype for x in gradients] == [dtype] * 3


def test_autocast_brings_tensors_of_two_dtypes_together_as_rotary_embeddings_leave_them():
    q, k, v = tensors(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = fk.flash_attn_func(q, k, v.bfloat16())
    assert torch.equal(mixed, fk.flash_attn_func(q.bfloat16(), k.bfloat16(), v.bfloat16()))


@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_what_is_inside_is_not_cast_again(implementation):
    """Neither a float64 call's products nor a float32 bias, forward and backward."""
    inputs = (*tensors(), torch.randn(6, 9, dtype=torch.float64, requires_grad=True))

    def results():
        out, lse = fk.flash_attn_func(*inputs[:3], bias=inputs[3], softcap=3.0, return_lse=True)
        plain = fk.flash_attn_func(
            *inputs[:3], bias=inputs[3], alibi_slopes=torch.rand(4, generator=seeded())
        )
        return (
            out,
            lse,
            plain,
            *torch.autograd.grad((out.sum() + lse.sum() + plain.square().sum()), inputs),
        )

    def seeded():
        return torch.Generator().manual_seed(0)

    with dispatch.force(implementation):
        wanted = results()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = results()
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("function", ["func", pytest.param("varlen", marks=pytest.mark.slow)])
def test_autocast_under_torch_compile(function):
    inputs = tensors(batch=1, seqlen_q=6, seqlen_k=6, dtype=torch.float32)

    def loss(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = called(function, q, k, v)
        return out, out.float().square().sum()

    out, total = torch.compile(loss, backend="aot_eager", fullgraph=True)(*inputs)
    plain, wanted = loss(*inputs)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, plain)
    for one, other in zip(
        torch.autograd.grad(total, inputs), torch.autograd.grad(wanted, inputs), strict=True
    ):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def test_torchs_mask_in_another_dtype_joins_under_autocast():
    q, k, v = (x.transpose(1, 2) for x in tensors(dtype=torch.float32))
    mask = torch.randn(6, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for given in (mask, mask.half(), mask.bfloat16(), mask > 0):
            out = fk.scaled_dot_product_attention(q, k, v, given, enable_gqa=True)
            wanted = scaled_dot_product_attention(q, k, v, given, enable_gqa=True)
            torch.testing.assert_close(out, wanted, atol=3e-2, rtol=3e-2)


def test_a_cache_in_autocasts_dtype_takes_float32_queries_and_keys():
    q, k, v = tensors(seqlen_q=2, seqlen_k=2, dtype=torch.float32)
    cache = torch.zeros(2, 5, 2, 5, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fk.flash_attn_with_kvcache(
            q, cache, cache.clone(), k, v, cache_seqlens=0, causal=True
        )
    assert out.dtype == torch.bfloat16
    assert torch.equal(cache[:, :2], k.bfloat16())


@pytest.mark.parametrize("value_dim", [1, 3])
def test_values_may_be_narrower_than_keys_in_every_function(value_dim):
    """As in multi-head latent attention: equal to values padded with zeros, gradients too."""
    q, k, v = tensors()
    narrow = v[..., :value_dim].detach().requires_grad_()
    wide = torch.nn.functional.pad(narrow, (0, v.shape[-1] - value_dim))
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    calls = [
        lambda v: fk.flash_attn_func(q, k, v, causal=True, softcap=2.0),
        lambda v: fk.flash_attn_func(q, k, v, learnable_sink=torch.ones(q.shape[2])),
        lambda v: fk.flash_attn_func(q, k, v, causal=True, dropout_p=0.3, dropout_seed=5),
        lambda v: fk.flash_attn_varlen_func(q[0, :5], k[0, :5], v[0, :5], ends, ends, 3, 3),
        lambda v: scaled_dot(q, k, v),
        lambda v: torch.compile(fk.flash_attn_func, backend="aot_eager")(q, k, v, causal=True),
        lambda v: torch.func.vmap(fk.flash_attn_func)(*(x[:, None] for x in (q, k, v)))[:, 0],
        lambda v: fk.flash_attn_with_kvcache(q, k, v.detach(), causal=True),
    ]
    for call in calls:
        out, wanted = call(narrow), call(wide)[..., :value_dim]
        torch.testing.assert_close(out, wanted)
        if out.requires_grad:
            given = torch.randn_like(out)
            (got,) = torch.autograd.grad(out, narrow, given)
            torch.testing.assert_close(got, torch.autograd.grad(wanted, narrow, given)[0])
    meta = fk.flash_attn_func(*(x.to("meta") for x in (q, k, narrow)))
    assert meta.shape == (*q.shape[:3], value_dim)


def scaled_dot(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return fk.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


def test_values_wider_than_keys_are_refused():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="v's head dimension must be from 1 to k's 5, not 6"):
        fk.flash_attn_func(q, k, torch.nn.functional.pad(v, (0, 1)))
