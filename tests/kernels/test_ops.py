"""The operators with the rest of torch: opcheck, torch.compile, checkpointing, FLOP counts. Computed by the
reference."""

import pytest
import torch
from attention_cases import Case, assert_close, expected, ours
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import flashtrain_kernels as fk
from flashtrain_kernels import dispatch, ops


@pytest.fixture(autouse=True)
def through_the_operators():
    with dispatch.force("reference"):
        yield


@pytest.mark.parametrize("case", [Case(2, 9, 7, 4, 2, 8, True), Case(1, 9, 9, 2, 1, 8, True, (4, 5))], ids=str)
def test_outputs_and_gradients_equal_the_reference(case):
    inputs = case.inputs(torch.float32)
    assert_close(ours(case, inputs), expected(case, inputs), 1e-5)


def test_opcheck_passes_for_every_operator():
    q, k, v = Case(1, 6, 8, 4, 2, 8, True).inputs(torch.float32)
    qkv = torch.randn(1, 6, 3, 2, 8, requires_grad=True)
    documents = fk.documents_from_ids(torch.tensor([[0, 0, 0, 1, 1, 1]]))
    torch.library.opcheck(ops.FORWARD, (q, k, v, None, None, 0.3, True))
    torch.library.opcheck(ops.FORWARD_PACKED, (qkv, *documents, 0.3, True))
    q, k, v, qkv = (x.detach() for x in (q, k, v, qkv))
    out, lse = ops.FORWARD(q, k, v, None, None, 0.3, True)
    torch.library.opcheck(ops.BACKWARD, (torch.ones_like(out), None, q, k, v, out, lse, None, None, 0.3, True))
    out, lse = ops.FORWARD_PACKED(qkv, None, None, 0.3, True)
    torch.library.opcheck(ops.BACKWARD_PACKED, (out, lse, qkv, out, lse, None, None, 0.3, True))


def test_fake_outputs_have_the_strides_of_real_ones():
    with FakeTensorMode():
        q = torch.empty(2, 4, 6, 8, dtype=torch.bfloat16).transpose(1, 2)
        out, lse = ops.FORWARD(q, q, q, None, None, 0.3, False)
        dq, _, _ = ops.BACKWARD(out, None, q, q, q, out, lse, None, None, 0.3, False)
        qkv = torch.empty(2, 6, 4, 3, 8).transpose(2, 3)
        dqkv = ops.BACKWARD_PACKED(out, None, qkv, out, lse, None, None, 0.3, False)
    assert (out.shape, out.stride()) == ((2, 6, 4, 8), (192, 32, 8, 1))
    assert (lse.shape, lse.stride(), lse.dtype) == ((2, 4, 6), (24, 6, 1), torch.float32)
    assert dq.is_contiguous()
    assert dqkv.is_contiguous()


@pytest.mark.parametrize("implementation", ["reference", "torch"])
def test_torch_compile_takes_the_whole_graph_and_changing_lengths(implementation):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def attend(qkv, documents):
        q, k, v = qkv.unbind(2)
        apart = fk.flash_attn_func(q, k, v, causal=True, documents=documents)
        return apart + fk.flash_attn_qkvpacked_func(qkv, causal=True, documents=documents)

    with dispatch.force(implementation):
        for length in (11, 12, 33):
            qkv = torch.randn(2, length, 3, 2, 8)
            documents = fk.documents_from_ids(torch.arange(length).expand(2, length) // 5)
            wanted = 2 * fk.reference.attention(*qkv.unbind(2), causal=True, documents=documents)
            torch.testing.assert_close(attend(qkv, documents), wanted, atol=1e-5, rtol=1e-5)
    assert len(graphs) == 1


def test_torch_compile_of_forward_and_backward():
    def loss(q, k, v):
        out, lse = fk.flash_attn_func(q, k, v, causal=True, return_lse=True)
        return (out**2).sum() + lse.sum()

    inputs = Case(2, 9, 9, 4, 2, 8, True).inputs(torch.float32)
    wanted = torch.autograd.grad(loss(*inputs), inputs)
    got = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*inputs), inputs)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.fixture
def forward_calls(monkeypatch):
    """How often the forward really runs."""
    calls = []
    compute = ops._compute_forward
    monkeypatch.setattr(ops, "_compute_forward", lambda *args: (calls.append(1), compute(*args))[1])
    return calls


def test_activation_checkpointing_recomputes_the_same(forward_calls):
    inputs = Case(1, 9, 9, 2, 2, 8, True).inputs(torch.float32)
    wanted = torch.autograd.grad(fk.flash_attn_func(*inputs, causal=True).sum(), inputs)
    out = checkpoint(lambda *x: fk.flash_attn_func(*x, causal=True) * 1.0, *inputs, use_reentrant=False)
    got = torch.autograd.grad(out.sum(), inputs)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)
    assert len(forward_calls) == 3


def test_selective_checkpointing_keeps_the_output_so_that_attention_is_not_computed_again(forward_calls):
    inputs = Case(1, 9, 9, 2, 2, 8, True).inputs(torch.float32)
    out = checkpoint(
        lambda *x: fk.flash_attn_func(*x, causal=True) * 1.0, *inputs, use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts([fk.FORWARD, fk.FORWARD_PACKED]),
    )  # fmt: skip
    torch.autograd.grad(out.sum(), inputs)
    assert len(forward_calls) == 1


def test_unused_log_sum_exp_costs_no_gradient_tensor(monkeypatch):
    seen = []
    compute = ops._compute_backward
    monkeypatch.setattr(ops, "_compute_backward", lambda *args: (seen.append(args[1]), compute(*args))[1])
    inputs = Case(1, 9, 9, 2, 2, 8, True).inputs(torch.float32)
    torch.autograd.grad(fk.flash_attn_func(*inputs).sum(), inputs)
    assert seen == [None]


def test_only_the_log_sum_exp_used():
    inputs = Case(1, 9, 9, 2, 2, 8, True).inputs(torch.float32)
    dq, dk = torch.autograd.grad(fk.flash_attn_func(*inputs, return_lse=True)[1].sum(), inputs[:2])
    exact = [x.detach().double().requires_grad_() for x in inputs]
    lse = fk.reference.attention(*exact, return_lse=True)[1]
    wanted = torch.autograd.grad(lse.sum(), exact[:2])
    torch.testing.assert_close(dq.double(), wanted[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(dk.double(), wanted[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_flops_are_counted_and_a_backward_is_two_and_a_half_forwards(packed):
    qkv = torch.randn(2, 16, 3, 4, 8, requires_grad=True)
    forward = 4 * 2 * 4 * 8 * (16 * 17 // 2)
    with FlopCounterMode(display=False) as counter:
        if packed:
            out = fk.flash_attn_qkvpacked_func(qkv, causal=True)
        else:
            out = fk.flash_attn_func(*qkv.unbind(2), causal=True)
        out.sum().backward()
    counted = counter.get_flop_counts()["Global"]
    ours_only = {str(op): flops for op, flops in counted.items() if "flashtrain_kernels" in str(op)}
    assert sorted(ours_only.values()) == [forward, forward * 5 // 2]
