"""The public functions on a CPU: results, mistakes, and what they say."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_cases import Case, assert_close, expected, ours

import flashtrain_kernels as fk
from flashtrain_kernels import dispatch, torch_sdpa

CASES = [
    Case(2, 9, 9, 4, 2, 8, causal=True),
    Case(1, 5, 9, 2, 2, 16, causal=True),
    Case(1, 9, 5, 2, 1, 16, causal=True),
    Case(1, 9, 5, 2, 1, 16, causal=False),
    Case(2, 12, 12, 2, 1, 8, causal=True, document_lengths=(5, 7)),
    Case(2, 12, 12, 2, 2, 8, causal=False, document_lengths=(5, 7)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_cpu_outputs_and_gradients_equal_the_reference(case):
    inputs = case.inputs(torch.float32)
    wanted = expected(case, inputs)
    assert_close(ours(case, inputs), wanted, 1e-5)
    out = fk.flash_attn_func(*inputs, causal=case.causal, documents=case.documents())
    torch.testing.assert_close(out.double(), wanted["out"], atol=1e-5, rtol=1e-5)
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_cpu_float64_is_computed_in_float64(case):
    inputs = case.inputs(torch.float64)
    assert_close(ours(case, inputs), expected(case, inputs), 1e-12)
    out = fk.flash_attn_func(*inputs, causal=case.causal, documents=case.documents())
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, expected(case, inputs)["out"], atol=1e-12, rtol=1e-12)


def test_float64_is_refused_where_the_triton_kernels_would_run():
    x = torch.zeros(1, 4, 1, 8, dtype=torch.float64)
    with dispatch.force("portable"), pytest.raises(TypeError, match="q is float64, which the Triton kernels do not"):
        fk.flash_attn_func(x, x, x)


def test_packed_equals_unpacked():
    qkv = torch.randn(2, 9, 3, 2, 16)
    packed = fk.flash_attn_qkvpacked_func(qkv, causal=True, softmax_scale=0.3)
    assert torch.equal(packed, fk.flash_attn_func(*qkv.unbind(2), causal=True, softmax_scale=0.3))
    out, lse = fk.flash_attn_qkvpacked_func(qkv, return_lse=True)
    assert (out.shape, lse.shape) == ((2, 9, 2, 16), (2, 2, 9))


def test_one_line_is_logged_a_process(monkeypatch, caplog):
    monkeypatch.setattr(torch_sdpa, "_said", False)
    x = torch.zeros(1, 4, 1, 8)
    with caplog.at_level("INFO", logger="flashtrain_kernels"):
        fk.flash_attn_func(x, x, x)
        fk.flash_attn_func(x, x, x)
    assert len(caplog.records) == 1
    assert "scaled_dot_product_attention" in caplog.text


def test_explain_is_one_line_with_the_reason():
    x = torch.zeros(1, 4, 1, 8)
    line = fk.explain(x, x, x)
    assert "scaled_dot_product_attention" in line
    assert "cpu" in line
    assert "\n" not in line


def test_the_import_needs_no_triton():
    program = "import sys; sys.modules['triton'] = None; import flashtrain_kernels, torch; "
    program += "x = torch.ones(1, 4, 1, 8); print(flashtrain_kernels.flash_attn_func(x, x, x).sum().item())"
    path = str(Path(fk.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": path, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.strip() == "32.0", result.stderr


Q = torch.zeros(2, 6, 4, 8)
KV = torch.zeros(2, 5, 2, 8)
DOCUMENTS = fk.documents_from_ids(torch.zeros(2, 6, dtype=torch.int32))
MISTAKES = [
    ((None, KV, KV), {}, TypeError, r"q must be a tensor \(B, S, heads, D\), not NoneType"),
    ((Q[0], KV, KV), {}, ValueError, r"q must have the four dimensions .* not the shape \(6, 4, 8\)"),
    ((Q.long(), KV, KV), {}, TypeError, "q must be float16, bfloat16, float32 or, on the CPU, float64, not int64"),
    ((Q.double(), KV, KV), {}, TypeError, "k has dtype float32 and q has float64"),
    ((Q, KV, KV.bfloat16()), {}, TypeError, "v has dtype bfloat16 and q has float32.*autocast"),
    ((Q, KV.to("meta"), KV), {}, ValueError, "k is on meta and q on cpu"),
    ((Q, KV, KV[:, :3]), {}, ValueError, r"k and v must have the same shape, not \(2, 5, 2, 8\) and \(2, 3, 2, 8\)"),
    ((Q, KV[:1], KV[:1]), {}, ValueError, "same batch size, not 2 and 1"),
    ((Q, KV[..., :4], KV[..., :4]), {}, ValueError, "same head dimension, not 8 and 4"),
    ((Q[:, :, :3], KV, KV), {}, ValueError, "q's heads must be a multiple of k's heads, not 3 and 2"),
    ((torch.zeros(1, 2, 1, 257),) * 3, {}, ValueError, "the head dimension must be from 1 to 256, not 257"),
    ((Q, KV, KV), {"softmax_scale": 0.0}, ValueError, "softmax_scale must be a positive finite number, not 0.0"),
    ((Q, KV, KV), {"softmax_scale": "1"}, TypeError, "softmax_scale must be a number or None, not str"),
    ((Q, KV, KV), {"causal": 1}, TypeError, "causal must be True or False, not 1"),
    ((Q, KV, KV), {"documents": DOCUMENTS}, ValueError, "documents need as many queries as keys, not 6 and 5"),
    ((Q, Q, Q), {"documents": (1, 2)}, TypeError, "documents must come from documents_from_ids, not be a tuple"),
    ((Q[:1], Q[:1], Q[:1]), {"documents": DOCUMENTS}, ValueError, r"documents.start must have the shape .*\(1, 6\)"),
]


@pytest.mark.parametrize(
    ("tensors", "options", "error", "message"), MISTAKES, ids=[mistake[3][:40] for mistake in MISTAKES]
)
def test_a_mistake_is_named_before_anything_runs(tensors, options, error, message):
    with pytest.raises(error, match=message):
        fk.flash_attn_func(*tensors, **options)


def test_a_packed_tensor_of_another_shape_is_named():
    with pytest.raises(ValueError, match=r"qkv must have the shape \(B, S, 3, H, D\), not \(2, 6, 4, 8\)"):
        fk.flash_attn_qkvpacked_func(Q)
