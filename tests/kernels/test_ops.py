"""The operators among torch's own: opcheck, fake tensors, autograd and checkpointing,
computed by the reference."""

from functools import partial

import pytest
import torch
from attention_cases import Case, assert_close, expected, ours
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flashtrain_kernels as fk
from flashtrain_kernels import dispatch, eager, masks, ops
from flashtrain_kernels.forms import BATCH, KV_PACKED, QKV_PACKED
from flashtrain_kernels.options import Options, pack, unpack

pytestmark = pytest.mark.usefixtures("through_the_operators")
B, S, H, K, D = 2, 18, 4, 2, 8
BLOCKS = (16,) * 6
CASE = Case(1, 9, 9, 4, 2, 8, "causal")


def documents(rows=B, length=S):
    return masks.document(torch.arange(length).expand(rows, length) // 5, causal=True)


def shuffled():
    order = torch.randperm(S, generator=torch.Generator().manual_seed(0))
    return masks.global_window(S, 2, (4, 1)).select(order, order.flip(0))


def block_mask():
    blocks = torch.tensor([[[1, 0], [1, 1]]], dtype=torch.bool)
    return fk.block_mask(blocks, block_size=16, seqlen_q=S, seqlen_k=S, causal=True)


OPTIONS = {
    "window and slopes": lambda: {"left": -4, "right": 1, "alibi_slopes": torch.rand(B, H)},
    "slopes and dropout": lambda: {
        "alibi_slopes": torch.rand(B, H), "dropout_p": 0.25, "seed": torch.tensor([3, 0, 0])
    },
    "mask": lambda: {"mask": documents(), "softcap": 2.0},
    "planned mask and bias": lambda: {
        "mask": documents(1).planned_for(BLOCKS),
        "bias": torch.randn(1, H, S, S, requires_grad=True)
    },
    "block mask": lambda: {"mask": block_mask(), "right": 0},
    "everything": lambda: {
        "bias": torch.randn(B, 1, 1, S, requires_grad=True), "dropout_p": 0.25,
        "seed": torch.tensor([3, 1, 2]),
        "softcap": 2.0, "alibi_slopes": torch.rand(H), "mask": shuffled().planned_for(BLOCKS),
    },
}  # fmt: skip
SHAPES = {
    "": [(B, S, H, D), (B, S, K, D), (B, S, K, D)],
    "qkvpacked": [(B, S, 3, H, D)],
    "kvpacked": [(B, S, H, D), (B, S, 2, K, D)],
}
FORWARDS = {"": ops.FORWARD, "qkvpacked": ops.FORWARD_QKVPACKED, "kvpacked": ops.FORWARD_KVPACKED}
FORMS = {"": BATCH, "qkvpacked": QKV_PACKED, "kvpacked": KV_PACKED}
FUNCTIONS = {
    "": fk.flash_attn_func,
    "qkvpacked": fk.flash_attn_qkvpacked_func,
    "kvpacked": fk.flash_attn_kvpacked_func,
}
BACKWARDS = {
    "": ops.BACKWARD,
    "qkvpacked": ops.BACKWARD_QKVPACKED,
    "kvpacked": ops.BACKWARD_KVPACKED,
}
CALLS = [("", name) for name in OPTIONS] + [
    (packing, name)
    for packing in ("qkvpacked", "kvpacked")
    for name in ("window and slopes", "everything")
]
CHECKED = [
    pytest.param(
        *call, marks=[] if call in (("", "block mask"), ("", "everything")) else pytest.mark.slow
    )
    for call in CALLS
]


def forward_arguments(packing, name):
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in SHAPES[packing]]
    return (*inputs, *pack(Options(scale=0.3, **OPTIONS[name]())))


def backward_arguments(packing, name):
    arguments = [
        x.detach() if isinstance(x, torch.Tensor) else x for x in forward_arguments(packing, name)
    ]
    out, lse = FORWARDS[packing](*arguments)
    tensors, options = arguments[: len(SHAPES[packing])], arguments[len(SHAPES[packing]) :]
    dlse = None if name == "window and slopes" else torch.rand_like(lse)
    return (torch.rand_like(out), dlse, *tensors, out, lse, options[0] is not None, *options)


# --- registration ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("packing", "name"), CHECKED)
@pytest.mark.parametrize("backward", [False, True])
def test_opcheck(backward, packing, name):
    arguments = (backward_arguments if backward else forward_arguments)(packing, name)
    torch.library.opcheck((BACKWARDS if backward else FORWARDS)[packing], arguments)


def transposed(shape, dtype=torch.float32):
    """Heads before tokens in memory, as a projection split per head leaves them."""
    return torch.randn(shape).to(dtype).transpose(1, -2).contiguous().transpose(1, -2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("packing", SHAPES)
def test_fake_outputs_are_those_of_real_tensors_and_contiguous_whatever_the_strides(packing, dtype):
    inputs = [transposed(shape, dtype) for shape in SHAPES[packing]]
    bias = torch.randn(H, S).to(dtype).expand(1, S, H, S).transpose(1, 2)
    options = pack(Options(scale=0.3, right=0, bias=bias))

    def both(inputs, options):
        out, lse = FORWARDS[packing](*inputs, *options)
        dout = out.sum(-1, keepdim=True).expand(out.shape)
        return out, lse, *BACKWARDS[packing](dout, None, *inputs, out, lse, True, *options)

    real = both(inputs, options)
    with FakeTensorMode() as mode:
        fake_options = options._replace(bias=mode.from_tensor(bias))
        fake = both([mode.from_tensor(x) for x in inputs], fake_options)
    for one, other in zip(fake, real, strict=True):
        assert one.is_contiguous()
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    assert real[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


# --- autograd -------------------------------------------------------------------------------------


@pytest.fixture
def computed(monkeypatch):
    """What really runs, in order: ("forward", dlse: None, bias gradient: None) or
    ("backward", dlse, dbias)."""
    calls = []
    forward, backward = dispatch.forward, dispatch.backward

    def counting_forward(*args):
        calls.append(("forward", None, None))
        return forward(*args)

    def counting_backward(*args):
        calls.append(("backward", args[-1].dlse, args[-1].dbias))
        return backward(*args)

    monkeypatch.setattr(dispatch, "forward", counting_forward)
    monkeypatch.setattr(dispatch, "backward", counting_backward)
    return calls


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 9, 7, 4, 2, 8, "causal", softcap=2.0, bias=(0, 0, 0, 0)),
        Case(1, 21, 21, 2, 1, 8, "shuffled", dropout=0.2, alibi="alibi", bias=(1, 0, 1, 0)),
        Case(2, 40, 50, 2, 2, 8, "blocks causal", dropout=0.2),
    ],
    ids=str,
)
def test_outputs_and_gradients_equal_the_float64_reference(case):
    inputs = case.inputs(torch.float32)
    assert_close(ours(case, inputs), expected(case, inputs), 1e-5)


@pytest.mark.parametrize(("packing", "name"), CALLS)
def test_the_operators_own_gradients_are_those_of_the_functions(packing, name):
    arguments = forward_arguments(packing, name)
    leaves = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
    options = unpack(arguments[len(SHAPES[packing]) :])
    gradients = []
    for out, lse in (
        FORWARDS[packing](*arguments),
        eager.attention(ops.FORWARD_IN[FORMS[packing]], arguments[: len(SHAPES[packing])], options),
    ):
        loss = out.square().sum() + torch.where(lse.isfinite(), lse, 0.0).sum()
        gradients.append(torch.autograd.grad(loss, leaves))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_a_gradient_through_the_log_sum_exp_alone():
    inputs = Case(1, 9, 7, 4, 2, 8, "window").inputs(torch.float32)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    gradients = []
    for attention, leaves in ((fk.flash_attn_func, inputs), (fk.reference.attention, exact)):
        lse = attention(*leaves, window_size=(2, 1), return_lse=True)[1]
        gradients.append(torch.autograd.grad(torch.where(lse.isfinite(), lse, 0.0).sum(), leaves))
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)
    assert not gradients[0][2].any()  # V is no part of it


def test_gradients_that_nobody_wants_cost_none(computed):
    inputs = CASE.inputs(torch.float32)
    torch.autograd.grad(fk.flash_attn_func(*inputs, return_lse=True)[0].sum(), inputs)
    assert computed == [("forward", None, None), ("backward", None, None)]
    torch.autograd.grad(fk.flash_attn_func(*inputs, bias=torch.zeros(9, 9)).sum(), inputs)
    assert computed[-1] == ("backward", None, None)


def test_the_gradient_of_the_bias_alone():
    q, k, v, bias = Case(1, 9, 9, 4, 2, 8, bias=(1, 0, 0, 1)).inputs(torch.float32)
    (got,) = torch.autograd.grad(
        fk.flash_attn_func(q.detach(), k.detach(), v.detach(), bias=bias).square().sum(), bias
    )
    (wanted,) = torch.autograd.grad(fk.flash_attn_func(q, k, v, bias=bias).square().sum(), bias)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("packing", SHAPES)
def test_without_gradients_nothing_is_kept_for_a_backward(packing):
    inputs = [torch.randn(shape) for shape in SHAPES[packing]]
    function = FUNCTIONS[packing]
    assert not function(*inputs).requires_grad
    with torch.no_grad():
        assert not function(*[x.requires_grad_() for x in inputs]).requires_grad


def test_a_second_derivative_is_refused_and_not_left_out():
    inputs = CASE.inputs(torch.float32)
    loss = fk.flash_attn_func(*inputs).sum() + inputs[0].pow(3).sum()
    (dq,) = torch.autograd.grad(loss, inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="attention has no second derivative"):
        torch.autograd.grad(dq.sum(), inputs[0])


# --- activation checkpointing ---------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"dropout_p": 0.3}], ids=["causal", "dropout without a seed"]
)
def test_activation_checkpointing_recomputes_the_same(computed, reentrant, options):
    inputs = CASE.inputs(torch.float32)
    weights = torch.randn(1, 9, 4, 8)
    torch.manual_seed(1)
    wanted = torch.autograd.grad((fk.flash_attn_func(*inputs, **options) * weights).sum(), inputs)
    computed.clear()
    torch.manual_seed(1)
    out = checkpoint(
        lambda *x: fk.flash_attn_func(*x, **options) * 1.0, *inputs, use_reentrant=reentrant
    )
    (out * weights).sum().backward()
    assert all(torch.equal(x.grad, other) for x, other in zip(inputs, wanted, strict=True))
    assert [name for name, _, _ in computed] == ["forward", "forward", "backward"]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("packing", SHAPES)
def test_selective_checkpointing_keeps_the_outputs_so_that_attention_is_not_computed_again(
    computed, packing, compiled
):
    inputs = [torch.randn(shape, requires_grad=True) for shape in SHAPES[packing]]

    def block(*inputs):
        out, lse = FUNCTIONS[packing](*[x * 2.0 for x in inputs], causal=True, return_lse=True)
        return out.sin() + lse.transpose(1, 2)[..., None]

    def checkpointed(*inputs):
        contexts = partial(create_selective_checkpoint_contexts, fk.FORWARDS)
        return checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts)

    wanted = torch.autograd.grad(block(*inputs).sum(), inputs)
    computed.clear()
    if compiled:
        checkpointed = torch.compile(checkpointed, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(checkpointed(*inputs).sum(), inputs)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert [name for name, _, _ in computed] == ["forward", "backward"]
