"""The oracle itself, against torch's own attention and against numerical gradients."""

import pytest
import torch
from attention_cases import Case, assert_close, expected, run, upstream

from flashtrain_kernels import reference


@pytest.mark.parametrize("causal", [False, True])
def test_it_equals_torchs_attention(causal):
    q, k, v = Case(2, 9, 9, 4, 2, 8, causal).inputs(torch.float64)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, enable_gqa=True
    )
    torch.testing.assert_close(reference.attention(q, k, v, causal=causal), wanted.transpose(1, 2))


@pytest.mark.parametrize("documents", [None, (3, 4)], ids=["dense", "documents"])
def test_its_gradients_are_the_numerical_ones(documents):
    case = Case(1, 7, 7, 2, 1, 3, causal=True, document_lengths=documents)

    def attention(q, k, v):
        return reference.attention(q, k, v, causal=True, documents=case.documents(), return_lse=True)

    assert torch.autograd.gradcheck(attention, case.inputs(torch.float64))


@pytest.mark.parametrize(
    "case", [Case(2, 5, 7, 4, 2, 8, True), Case(1, 7, 5, 2, 1, 8, True), Case(1, 9, 9, 2, 2, 8, False, (4, 5))], ids=str
)
def test_the_written_out_backward_equals_autograd(case):
    inputs = case.inputs(torch.float64)
    wanted = expected(case, inputs)
    dout, dlse = upstream(case, "cpu", torch.float64)
    dlse = torch.where(wanted["lse"].isfinite(), dlse.double(), 0.0)
    dq, dk, dv = reference.attention_backward(
        dout, dlse, *(x.detach() for x in inputs), wanted["out"], wanted["lse"], softmax_scale=case.head_dim**-0.5,
        causal=case.causal, documents=case.documents(),
    )  # fmt: skip
    assert_close({"dq": dq, "dk": dk, "dv": dv}, {name: wanted[name] for name in ("dq", "dk", "dv")}, 1e-10)


def test_masked_values_never_contribute_and_visible_ones_do():
    q, k, v = (x.detach() for x in Case(1, 4, 4, 1, 1, 8, causal=True).inputs(torch.float64))
    wanted = reference.attention(q, k, v, causal=True)
    v = v.clone()
    v[:, 2] = torch.nan
    out = reference.attention(q, k, v, causal=True)
    torch.testing.assert_close(out[:, :2], wanted[:, :2])
    assert out[:, 2:].isnan().all()


def test_rows_that_see_nothing():
    case = Case(1, 5, 2, 1, 1, 8, causal=True)
    got = run(reference.attention, case, case.inputs(torch.float64))
    assert got["out"][:, :3].eq(0).all()
    assert got["lse"][:, :, :3].eq(-torch.inf).all()
    assert got["dq"].isfinite().all()
    assert got["dq"][:, :3].eq(0).all()
