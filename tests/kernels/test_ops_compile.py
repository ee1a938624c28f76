"""The operators under torch.compile: one graph, forward and backward, for any lengths.
Computed by the reference."""

import pytest
import torch
from attention_cases import Case, assert_close, ours, run
from plain_formula import cumulative

import flashtrain_kernels as fk
from flashtrain_kernels import dispatch, masks
from flashtrain_kernels.environment import constant

pytestmark = pytest.mark.usefixtures("through_the_operators")


def trained(attention, inputs, *others):
    """Outputs and gradients of one step: what a compiled function and the
    plain one are compared by."""
    out, lse = attention(*inputs, *others)
    loss = out.square().sum() + torch.where(lse.isfinite(), lse, 0.0).sum()
    return [out, lse, *torch.autograd.grad(loss, inputs)]


def assert_one_compilation_serves(attention, calls):
    """Forward and backward of every call, as the plain function computes them, from
    one graph of the whole."""
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for inputs, others in calls:
            results = trained(compiled, inputs, *others), trained(attention, inputs, *others)
            for got, wanted in zip(*results, strict=True):
                torch.testing.assert_close(got, wanted)


LENGTHS = (11, 13, 33)
# For tables of tiles or blocks of 16: torch makes another graph for a size of 1, and
# where two sizes that happened to be equal when it made the first one (heads and blocks,
# say) are not any more.
LONG = (90, 100, 120)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"window_size": (4, 0), "softcap": 2.0}, {"dropout_p": 0.2}], ids=str
)
def test_one_graph_for_any_lengths_of_queries_and_keys(options):
    calls = [
        (Case(2, seqlen, seqlen + more, 4, 2, 8).inputs(torch.float32), ())
        for seqlen, more in zip(LENGTHS, (3, 8, -5), strict=True)
    ]
    assert_one_compilation_serves(
        lambda q, k, v: fk.flash_attn_func(q, k, v, **options, dropout_seed=7, return_lse=True),
        calls,
    )


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["qkvpacked", "kvpacked"])
def test_one_graph_for_any_lengths_of_packed_inputs(packing):
    def draw(*shape):
        return torch.randn(shape, requires_grad=True)

    if packing == "qkvpacked":
        function, calls = (
            fk.flash_attn_qkvpacked_func,
            [([draw(2, n, 3, 4, 8)], ()) for n in LENGTHS],
        )
    else:
        function = fk.flash_attn_kvpacked_func
        calls = [([draw(2, n, 4, 8), draw(2, n + 3, 2, 2, 8)], ()) for n in LENGTHS]
    assert_one_compilation_serves(lambda *x: function(*x, causal=True, return_lse=True), calls)


@pytest.mark.slow
def test_one_graph_for_any_lengths_of_packed_sequences():
    def attend(q, k, v, cu_seqlens, longest):
        return fk.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            0.2,
            causal=True,
            dropout_seed=7,
            return_lse=True,
        )

    calls = []
    for lengths in ([5, 6, 9, 1, 7, 8], [30, 1, 8], [20, 2, 4, 70]):
        cu_seqlens = cumulative(lengths)
        inputs = [
            x[0].detach().requires_grad_()
            for x in Case(1, sum(lengths), sum(lengths), 4, 2, 8).inputs(torch.float32)
        ]
        calls.append((inputs, (cu_seqlens, max(lengths))))
    assert_one_compilation_serves(attend, calls)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["documents", "planned, with key positions"])
def test_one_graph_for_masks_of_any_length_with_a_bias_that_has_a_gradient(kind):
    def attend(q, k, v, bias, mask):
        return fk.flash_attn_func(q, k, v, bias=bias, mask=mask, return_lse=True)

    calls = []
    for seqlen in LONG:
        mask = masks.document(torch.arange(seqlen).expand(2, seqlen) // 5, causal=True)
        if kind != "documents":
            mask = mask.select(torch.arange(seqlen).flip(0), torch.arange(seqlen)).planned_for(
                (16,) * 6
            )
        calls.append(
            (Case(2, seqlen, seqlen, 4, 2, 8, bias=(1, 0, 0, 0)).inputs(torch.float32), (mask,))
        )
    assert_one_compilation_serves(attend, calls)


@pytest.mark.slow
def test_one_graph_that_makes_its_mask_itself():
    def attend(q, k, v, ids):
        mask = masks.prefix_lm(torch.full_like(ids, 2), documents=ids)
        return fk.flash_attn_func(q, k, v, mask=mask, return_lse=True)

    calls = [
        (
            Case(2, n, n, 4, 2, 8).inputs(torch.float32),
            ((torch.arange(n) // 6).expand(2, n).contiguous(),),
        )
        for n in LENGTHS
    ]
    assert_one_compilation_serves(attend, calls)


@pytest.mark.slow
def test_one_graph_for_block_masks_of_any_length():
    def attend(q, k, v, mask):
        return fk.flash_attn_func(q, k, v, causal=True, mask=mask, return_lse=True)

    calls = []
    for seqlen in LONG:
        blocks = fk.block_sparse.butterfly(-(-seqlen // 16))
        mask = fk.block_mask(blocks, block_size=16, seqlen_q=seqlen, seqlen_k=seqlen, causal=True)
        calls.append((Case(1, seqlen, seqlen, 4, 2, 8).inputs(torch.float32), (mask,)))
    assert_one_compilation_serves(attend, calls)


def test_a_compiled_step_runs_one_forward_and_one_backward(monkeypatch):
    ran = []
    for name in ("forward", "backward"):
        real = getattr(dispatch, name)
        monkeypatch.setattr(
            dispatch, name, lambda *args, n=name, real=real: (ran.append(n), real(*args))[1]
        )
    case = Case(2, 9, 9, 4, 2, 8, "causal", bias=(0, 0, 0, 0))
    inputs = case.inputs(torch.float32)
    compiled = torch.compile(fk.flash_attn_func, backend="aot_eager", fullgraph=True)
    got = run(compiled, inputs, case.options())
    assert ran == ["forward", "backward"]
    assert_close(got, ours(case, inputs), 1e-6)


def test_functions_are_marked_constant_as_torch_does_it():
    ours, theirs = (
        mark(lambda: None) for mark in (constant, torch.compiler.assume_constant_result)
    )
    assert vars(ours) == vars(theirs) != {}
