"""The public functions among torch's own: dtypes, torch.compile, logging, explain, and an
import without Triton."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plain_formula import assert_one_graph_serves, tensors

import flashtrain_kernels as fk
from flashtrain_kernels import dispatch, masks, torch_attention


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"softcap": 2.0}, {"alibi_slopes": torch.ones(4)}], ids=str
)
def test_lower_precision_is_near_float64(dtype, options):
    inputs = [x.detach() for x in tensors(dtype=dtype)]
    out = fk.flash_attn_func(*inputs, **options)
    assert out.dtype == dtype
    wanted = fk.flash_attn_func(*(x.double() for x in inputs), **options)
    torch.testing.assert_close(
        out.double(), wanted, atol=4 * torch.finfo(dtype).eps, rtol=4 * torch.finfo(dtype).eps
    )


def test_float64_is_refused_where_the_triton_kernels_would_run():
    x = torch.zeros(1, 4, 1, 8, dtype=torch.float64)
    with (
        dispatch.force("portable"),
        pytest.raises(TypeError, match="q is float64, which the Triton kernels do not"),
    ):
        fk.flash_attn_func(x, x, x)


# By the operators, with gradients too: test_ops_compile.py.
@pytest.mark.parametrize(
    "options", [{"window_size": (3, 2), "return_lse": True}, {"dropout_p": 0.2}], ids=str
)
def test_torch_compile_takes_the_whole_graph_and_changing_lengths(options):
    calls = [tensors(seqlen_q=seqlen, seqlen_k=seqlen + 3) for seqlen in (6, 11, 12)]
    assert_one_graph_serves(lambda q, k, v: fk.flash_attn_func(q, k, v, **options), calls)


@pytest.mark.parametrize(
    "implementation", ["torch", pytest.param("reference", marks=pytest.mark.slow)]
)
def test_torch_compile_with_masks_and_biases_of_changing_lengths(implementation):
    def attend(q, k, v, bias, slopes, mask, hidden):
        first = fk.flash_attn_func(q, k, v, bias=bias, alibi_slopes=slopes, mask=mask)
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        return first + fk.scaled_dot_product_attention(
            *heads_first, hidden, enable_gqa=True
        ).transpose(1, 2)

    calls = []
    for seqlen in (6, 11, 12):
        bias, hidden = torch.randn(4, seqlen, 1).double(), torch.rand(seqlen, seqlen) > 0.2
        mask = masks.document(torch.arange(seqlen).expand(2, seqlen) // 4, causal=True)
        calls.append(
            (*tensors(seqlen_q=seqlen, seqlen_k=seqlen), bias, torch.rand(7, 4), mask, hidden)
        )
    with dispatch.force(implementation):
        assert_one_graph_serves(attend, calls)


def test_one_line_is_logged_a_process(monkeypatch, caplog):
    monkeypatch.setattr(torch_attention, "_reported", False)
    x = torch.zeros(1, 4, 1, 8)
    with caplog.at_level("INFO", logger="flashtrain_kernels"):
        fk.flash_attn_func(x, x, x)
        fk.flash_attn_func(x, x, x)
    assert len(caplog.records) == 1
    assert "scaled_dot_product_attention" in caplog.text


def test_explain_is_one_line_with_the_reason_and_draws_nothing():
    x = torch.zeros(1, 4, 1, 8)
    state = torch.get_rng_state()
    line = fk.explain(x, x, x, 0.1, causal=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert line.startswith("torch scaled_dot_product_attention")
    assert "tensors are on cpu" in line
    assert line.endswith("causal, dropout, head dimension 8, float32")
    with dispatch.force("reference"):
        assert "reference in plain PyTorch: forced" in fk.explain(x, x, x)
    with pytest.raises(ValueError, match="dropout_p"):
        fk.explain(x, x, x, 1.5)


@pytest.mark.integration  # a process
def test_the_import_needs_no_triton_and_not_torchs_compiler():
    program = (
        "import sys, torch; sys.modules['triton'] = None; before = 'torch._dynamo' in sys.modules; "
    )
    program += (
        "import flashtrain_kernels; assert before == ('torch._dynamo' in sys.modules), "
        "'slow to import'; "
    )
    program += (
        "x = torch.ones(1, 4, 1, 8); print(flashtrain_kernels.flash_attn_func(x, x, "
        "x).sum().item())"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(Path(fk.__file__).parents[1]), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.strip() == "32.0", result.stderr
