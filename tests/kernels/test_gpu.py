"""The kernels on an NVIDIA GPU of sm_80 or later: how exact they are, for
shapes and head dimensions.

    python -m pytest -m gpu tests/kernels

The features are in test_gpu_features.py; test_gpu_*.py hold the rest.
"""

import itertools

import pytest
import torch
from attention_cases import Case, assert_close, expected, ours
from gpu_checks import DEVICE, NEEDS_GPU, assert_as_exact_as_torch, assert_same

import flashtrain_kernels as fk

pytestmark = NEEDS_GPU
BF16, FP16 = torch.bfloat16, torch.float16

SHAPES = [
    Case(2, 128, 128, 4, 4, 64, "causal"), Case(2, 1000, 1000, 4, 2, 64, "causal"),
    Case(2, 1, 333, 4, 2, 64, "causal"),
    Case(2, 333, 1, 4, 4, 64, "causal"), Case(1, 257, 1025, 4, 4, 64, "causal"),
    Case(1, 1025, 257, 4, 4, 64, "causal"),
    Case(2, 1000, 777, 4, 4, 64), Case(1, 1, 1, 4, 4, 64), Case(1, 1000, 1000, 4, 4, 128),
    Case(1, 1023, 1023, 6, 3, 128, "causal"), Case(1, 1025, 257, 6, 3, 128, "causal"),
    Case(2, 1000, 1000, 4, 2, 256, "causal"), Case(1, 1025, 257, 3, 3, 256, "window"),
    Case(1, 257, 1025, 2, 1, 256, "causal"), Case(2, 1000, 777, 2, 2, 256),
    Case(1, 65, 129, 2, 2, 256),
    Case(1, 1, 65, 2, 1, 256, "causal"),
    # A head for each of 132 multiprocessors, or a little less: programs of the Hopper backward
    # then have whole heads.
    Case(33, 500, 500, 4, 4, 64, "causal"), Case(33, 130, 333, 4, 4, 64, "causal"),
    Case(57, 257, 257, 4, 4, 64, "causal"), Case(33, 1000, 100, 4, 4, 64),
    Case(33, 200, 700, 4, 4, 64),
    Case(33, 1, 129, 4, 4, 64),
]  # fmt: skip
HEAD_DIMENSIONS = [
    (Case(2, 300, 300, 2, 2, 40, "causal"), BF16), (Case(2, 300, 301, 3, 1, 80), FP16),
    (Case(1, 300, 300, 2, 1, 192, "causal"), BF16), (Case(1, 300, 200, 2, 2, 256, "causal"), FP16),
    (Case(2, 500, 500, 4, 2, 512, "causal"), BF16), (Case(1, 300, 411, 2, 1, 512), FP16),
    (Case(1, 300, 300, 2, 2, 320, "window"), BF16),
    (Case(1, 600, 600, 4, 2, 192, "causal", value_dim=128), BF16),
    (Case(2, 300, 411, 4, 4, 192, value_dim=128), FP16),
    (Case(1, 300, 300, 2, 2, 96, "causal", value_dim=64), BF16),
    (Case(1, 130, 130, 2, 2, 1, "causal"), BF16), (Case(1, 200, 200, 2, 1, 17, "causal"), FP16),
]  # fmt: skip


CASES = [*zip(SHAPES, itertools.cycle((BF16, FP16))), *HEAD_DIMENSIONS]


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_the_error_is_at_most_twice_that_of_torchs_attention(case, dtype):
    assert_as_exact_as_torch(case, dtype)


FLOAT32 = [
    Case(2, 300, 411, 4, 2, 64, "causal"), Case(1, 411, 300, 2, 2, 128),
    Case(1, 200, 200, 2, 1, 80, "window"),
    Case(2, 301, 301, 2, 2, 64, "global window"),
    Case(2, 150, 201, 2, 2, 64, "causal", 3.0, "alibi", (0, 0, 0, 0), 0.3),
]  # fmt: skip


@pytest.mark.parametrize("case", FLOAT32, ids=str)
def test_float32_is_near_float32_accuracy(case):
    inputs = case.inputs(torch.float32, DEVICE)
    assert_close(ours(case, inputs), expected(case, inputs), 2e-4)


def test_any_strides(path):
    case = SHAPES[1]
    inputs = case.inputs(BF16, DEVICE)
    wanted = ours(case, inputs)
    heads_first = [
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs
    ]
    wide = [torch.cat([x.detach(), x.detach()], -1)[..., :64].requires_grad_() for x in inputs]
    turned = [
        x.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in inputs
    ]
    for strided in (heads_first, wide, turned):
        assert not strided[0].is_contiguous()
        got = ours(case, strided)
        for name, value in wanted.items():
            assert_same(got[name], value, added=path == "hopper" and name == "dq")


def test_an_expanded_output_gradient(path):
    inputs = SHAPES[0].inputs(BF16, DEVICE)
    out = fk.flash_attn_func(*inputs, causal=True)
    expanded = torch.autograd.grad(out, inputs, out.new_ones(()).expand_as(out), retain_graph=True)
    dense = torch.autograd.grad(out, inputs, torch.ones_like(out))
    for name, got, wanted in zip(("dq", "dk", "dv"), expanded, dense, strict=True):
        assert_same(got, wanted, added=path == "hopper" and name == "dq")


@pytest.mark.parametrize(
    "features", [{}, {"mask": True}, {"dropout_p": 0.2, "dropout_seed": 3}], ids=str
)
def test_packed_equals_unpacked_bit_for_bit(features, path):
    qkv = torch.randn(2, 777, 3, 4, 64, device=DEVICE, dtype=BF16, requires_grad=True)
    ids = torch.arange(777, device=DEVICE).expand(2, 777) // 200
    options = (
        {"mask": fk.masks.document(ids, causal=True)}
        if "mask" in features
        else {"causal": True, **features}
    )
    weight = torch.randn(2, 777, 4, 64, device=DEVICE, dtype=BF16)
    apart = fk.flash_attn_func(*qkv.unbind(2), **options)
    (wanted,) = torch.autograd.grad((apart * weight).sum(), qkv)
    for packed in (
        fk.flash_attn_qkvpacked_func(qkv, **options),
        fk.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], **options),
    ):
        assert torch.equal(packed, apart)
        (got,) = torch.autograd.grad((packed * weight).sum(), qkv)
        assert_same(got[:, :, 0], wanted[:, :, 0], added=path == "hopper")
        assert_same(got[:, :, 1:], wanted[:, :, 1:])


def test_explain_names_the_path_the_gpu_and_the_tiles(path):
    x = torch.zeros(1, 8, 1, 64, device=DEVICE, dtype=BF16)
    line = fk.explain(x, x, x)
    assert line.startswith("Hopper kernels" if path == "hopper" else "portable Triton kernels")
    assert "sm_" in line or "forced" in line
    assert "64" in line.split("forward", 1)[1]
