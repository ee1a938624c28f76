"""Replayed passes in Triton's interpreter: the same bits as the first time,
whatever changes in between.

test_portable.py runs this file in a process of its own. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/launch_cache_cases.py
"""

import sys
from pathlib import Path

import pytest
import torch
from attention_cases import Case, assert_close, expected, ours
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flashtrain_kernels as fk
from flashtrain_kernels import attend, dispatch, eager, ops
from flashtrain_kernels.backends.compiled import Interpreted
from flashtrain_kernels.backends.portable.tile_table import Tile
from flashtrain_kernels.flash_attn import flash_attn_heads_first
from flashtrain_kernels.forms import ROW, ROW_KV_PACKED, ROW_QKV_PACKED
from flashtrain_kernels.options import Options


@pytest.fixture(autouse=True)
def nothing_is_known():
    eager._KNOWN.clear()


@pytest.mark.parametrize("gradients", [False, True])
def test_a_call_like_the_ones_before_runs_fourteen_functions_of_ours(gradients):
    home, ran = str(Path(fk.__file__).parent), []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(home):
            ran.append(frame.f_code.co_name)
        if frame.f_code is Interpreted.__call__.__code__:  # from here on the kernels
            sys.setprofile(None)

    q, k, v = (torch.randn(1, 20, 2, 16, requires_grad=gradients) for _ in range(3))
    for _ in range(3):
        fk.flash_attn_func(q, k, v, causal=True)
    sys.setprofile(note)
    fk.flash_attn_func(q, k, v, causal=True)
    assert ran[-1] == "__call__"
    assert len(ran) <= 14, ran


@pytest.fixture
def replays(monkeypatch):
    """How many passes were replayed."""
    seen = []
    call = Interpreted.__call__
    monkeypatch.setattr(Interpreted, "__call__", lambda *args: (seen.append(1), call(*args))[1])
    return seen


FEATURES = [
    Case(1, 20, 33, 2, 1, 16, "causal"), Case(2, 20, 20, 2, 2, 16, "window"),
    Case(1, 33, 33, 2, 1, 16, "causal document"), Case(1, 33, 33, 1, 1, 16, "shuffled"),
    Case(1, 40, 50, 2, 2, 16, "blocks causal"),
    Case(2, 20, 20, 2, 1, 16, "causal", 2.0, "alibi_rows", (1, 0, 1, 0), 0.3),
    Case(1, 20, 20, 2, 2, 16, sinks=True),
]  # fmt: skip


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_a_replayed_call_computes_with_the_values_of_this_time(case, together, replays):
    with dispatch.force("portable", Tile(32, 16, 4, 1), together):
        for seed in range(4):
            inputs = case.inputs(torch.float32, seed=seed)
            assert_close(ours(case, inputs), expected(case, inputs), 2e-5)
            assert len(replays) == 2 * max(0, seed - 1)


@pytest.mark.parametrize("seed", [7, None])
def test_dropout_is_replayed_and_draws_anew_each_time(seed, replays):
    x = torch.randn(1, 20, 2, 16)
    results = []
    for _ in range(5):
        q, k, v = (x.clone().requires_grad_() for _ in range(3))
        out = fk.flash_attn_func(q, k, v, 0.5, dropout_seed=seed)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert len(replays) >= 4  # forward and backward, from the third on at the latest
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True)) == (
            seed is not None
        )
    if seed is not None:
        torch.testing.assert_close(
            results[-1][0],
            fk.reference.attention(x, x, x, dropout_p=0.5, dropout_seed=seed),
            atol=2e-5,
            rtol=2e-5,
        )


def test_dropout_by_torchs_signature_draws_anew_each_time_and_as_torchs_generator_says(replays):
    q, k, v = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))
    results = []
    for number in (0, 0, 0, 0, 1):
        torch.manual_seed(number)
        out = fk.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert len(replays) >= 4
    for other in results[1:4]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))
    assert not torch.equal(results[0][0], results[4][0])


def test_two_arguments_may_be_one_tensor_and_may_cease_to_be(replays):
    x, y, z = (torch.randn(1, 20, 1, 16) for _ in range(3))
    wanted = {
        name: fk.reference.attention(*parts)
        for name, parts in {"xxx": (x, x, x), "xyz": (x, y, z)}.items()
    }
    for first, second in (("xxx", "xyz"), ("xyz", "xxx")):
        eager._KNOWN.clear()
        replays.clear()
        for name in (first, first, first, second, second):
            parts = (x, x, x) if name == "xxx" else (x, y, z)
            torch.testing.assert_close(fk.flash_attn_func(*parts), wanted[name])
        assert len(replays) == 3


def test_gradients_of_packed_tensors_are_replayed(replays):
    for _ in range(4):
        qkv = torch.randn(1, 20, 3, 2, 16, requires_grad=True)
        out = fk.flash_attn_qkvpacked_func(qkv, causal=True)
        dout = torch.randn_like(out)
        (got,) = torch.autograd.grad(out, qkv, dout)
        q, k, v = (x.detach().requires_grad_() for x in qkv.unbind(2))
        exact = torch.autograd.grad(fk.reference.attention(q, k, v, causal=True), (q, k, v), dout)
        torch.testing.assert_close(got, torch.stack(exact, 2), atol=2e-5, rtol=2e-5)
    assert len(replays) == 4


@pytest.mark.parametrize("parts", [1, 2, 3], ids=["qkv", "q, kv", "q, k, v"])
def test_a_row_without_its_batch_dimension_is_replayed_and_gives_no_views(parts, replays):
    shapes = {1: [(20, 3, 2, 16)], 2: [(20, 2, 16), (20, 2, 2, 16)], 3: [(20, 2, 16)] * 3}[parts]
    options = Options(0.25, right=0)
    for turn in range(4):
        given = [torch.randn(shape, requires_grad=True) for shape in shapes]
        operator = ops.FORWARD_IN[{1: ROW_QKV_PACKED, 2: ROW_KV_PACKED, 3: ROW}[parts]]
        out, lse = eager.attention(operator, tuple(given), options)
        exact = [x.detach()[None].requires_grad_() for x in given]
        apart = [x for y in exact for x in (y.unbind(2) if y.dim() == 5 else [y])]
        wanted, wanted_lse = fk.reference.apply(*apart, options)
        torch.testing.assert_close((out, lse), (wanted[0], wanted_lse[0]), atol=2e-5, rtol=2e-5)
        weight = torch.randn_like(out)
        got = torch.autograd.grad(out.mul(weight).sum() + lse.square().sum(), given)
        loss = wanted.mul(weight).sum() + wanted_lse.square().sum()
        for one, other in zip(got, torch.autograd.grad(loss, exact), strict=True):
            torch.testing.assert_close(one, other[0], atol=5e-5, rtol=5e-5)
        assert len(replays) == 2 * max(0, turn - 1)
        assert not any(x._is_view() for x in (out, lse, *got))


OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "return_lse": True},
    "window, softcap": {"window_size": (4, 2), "softcap": 2.0},
    "dropout": {"dropout_p": 0.2, "dropout_seed": 3},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.1, 0.2, 0.3])},
    "sinks": {"learnable_sink": torch.tensor([0.5, 1.0, -1.0, 0.3]), "return_lse": True},
    "probabilities": {"dropout_p": 0.2, "dropout_seed": 3, "return_attn_probs": True},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_heads_first_is_the_same_call_and_is_replayed(options, replays):
    for _ in range(4):
        replays.clear()
        turned = [torch.randn(2, heads, 20, 16, requires_grad=True) for heads in (4, 2, 2)]
        plain = [x.detach().transpose(1, 2).requires_grad_() for x in turned]
        results = []
        for function, given in ((flash_attn_heads_first, turned), (fk.flash_attn_func, plain)):
            made = function(*given, **OPTIONS[options])
            made = made if isinstance(made, tuple) else (made,)
            weight = torch.linspace(-1, 1, made[0].numel()).view(made[0].shape)
            loss = made[0].mul(weight).sum() + (made[1].square().sum() if len(made) > 1 else 0)
            results.append((*made, *torch.autograd.grad(loss, given)))
        (*same, dq, dk, dv), (*wanted, wanted_dq, wanted_dk, wanted_dv) = results
        torch.testing.assert_close(same, wanted, atol=0, rtol=0)
        for one, other in ((dq, wanted_dq), (dk, wanted_dk), (dv, wanted_dv)):
            torch.testing.assert_close(one, other.transpose(1, 2), atol=0, rtol=0)
        assert not any(x._is_view() for x in same)
    assert len(replays) == 4


def test_heads_first_a_mistake_names_the_argument():
    x, y = torch.randn(1, 2, 20, 16), torch.randn(1, 2, 19, 16)
    for error, named, given, options in (
        (ValueError, "k and v|v", (x, x, y), {}),
        (ValueError, "dropout_p", (x, x, x), {"dropout_p": 1.5}),
        (ValueError, "k", (x, x[0, 0], x), {}), (TypeError, "q", (None, x, x), {}),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^({named}) must"):
            flash_attn_heads_first(*given, **options)


def test_other_shapes_strides_options_and_dtypes_are_other_passes(replays):
    x = torch.randn(1, 20, 2, 16)
    variants = [
        ((x, x, x), {}),
        ((x, x[:, :10], x[:, :10]), {}),
        ((x.transpose(1, 2).contiguous().transpose(1, 2), x, x), {}),
        ((x, x, x), {"causal": True}),
        ((x, x, x), {"softmax_scale": 0.5}),
        ((x, x, x), {"window_size": (3, 0)}),
        ((x, x, x), {"softcap": 2.0}),
        ((x.half(), x.half(), x.half()), {}),
    ]
    for _ in range(4):
        for tensors, options in variants:
            got, wanted = (
                fk.flash_attn_func(*tensors, **options),
                fk.reference.attention(*tensors, **options),
            )
            torch.testing.assert_close(got, wanted.to(got.dtype), atol=2e-3, rtol=2e-3)
    assert len(replays) == 2 * len(variants)


def test_what_is_forced_is_heeded_by_the_next_call(replays):
    x = torch.randn(1, 20, 2, 16)
    for _ in range(3):
        fk.flash_attn_func(x, x, x)
    assert len(replays) == 1
    with dispatch.force("reference"):
        fk.flash_attn_func(x, x, x)
    with dispatch.force("portable", Tile(16, 16, 4, 1)):
        fk.flash_attn_func(x, x, x)
    assert len(replays) == 1


@pytest.mark.parametrize(
    ("given", "mistake"),
    [
        ({"causal": 1}, TypeError),
        ({"softmax_scale": -1.0}, ValueError),
        ({"deterministic": 0}, TypeError),
        ({"window_size": (True, 1)}, TypeError),
        ({"window_size": (-2, 1)}, ValueError),
        ({"dropout_p": 1.0}, ValueError),
    ],
    ids=str,
)
def test_a_mistake_is_one_after_calls_that_were_right_too(given, mistake):
    x = torch.randn(1, 20, 2, 16)
    for options in ({}, {"causal": True}, {"window_size": (1, 1)}):
        for _ in range(3):
            fk.flash_attn_func(x, x, x, **options)
    with pytest.raises(mistake, match=next(iter(given))):
        fk.flash_attn_func(x, x, x, **given)


class Watching(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_operators_of_calls_that_are_known():
    inputs = [torch.randn(1, 20, 2, 16, requires_grad=True) for _ in range(3)]
    dout = torch.randn(1, 20, 2, 16)
    for _ in range(3):
        torch.autograd.grad(fk.flash_attn_func(*inputs), inputs, dout)
    with Watching() as mode:
        torch.autograd.grad(fk.flash_attn_func(*inputs), inputs, dout)
    names = [name for name in mode.seen if name.startswith("flashtrain_kernels")]
    assert names == ["flashtrain_kernels.forward.default", "flashtrain_kernels.backward.default"]


def test_vmap_and_grad_of_a_call_that_is_known():
    x = torch.randn(2, 1, 20, 2, 16)
    for _ in range(3):
        fk.flash_attn_func(x[0], x[0], x[0])

    def loss(x):
        return fk.flash_attn_func(x, x, x).square().sum()

    got = torch.vmap(torch.func.grad(loss))(x)
    for sample in range(2):
        leaf = x[sample].clone().requires_grad_()
        torch.testing.assert_close(
            got[sample], torch.autograd.grad(loss(leaf), leaf)[0], atol=1e-5, rtol=1e-5
        )


def test_a_subclass_of_tensor_sees_the_operator():
    names = []

    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            names.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.randn(1, 20, 2, 16)
    for _ in range(3):
        fk.flash_attn_func(x, x, x)
    with torch.no_grad():
        fk.flash_attn_func(x.as_subclass(Seen), x, x)
    assert any("forward" in name for name in names)


def test_checkpointing_recomputes_by_a_replay_what_was_computed_without_one(replays):
    inputs = [torch.randn(1, 20, 2, 16, requires_grad=True) for _ in range(3)]
    wanted = torch.autograd.grad(fk.reference.attention(*inputs).square().sum(), inputs)
    turned = [x.detach().transpose(1, 2).requires_grad_() for x in inputs]
    for _ in range(4):  # the forward and its recomputation are of different kinds in the first two
        out = checkpoint(lambda *x: fk.flash_attn_func(*x), *inputs, use_reentrant=False)
        got = torch.autograd.grad(out.square().sum(), inputs)
        for function in (flash_attn_heads_first, fk.scaled_dot_product_attention):
            out = checkpoint(function, *turned, use_reentrant=False)
            of_turned = torch.autograd.grad(out.square().sum(), turned)
            for one, other, exact in zip(got, of_turned, wanted, strict=True):
                torch.testing.assert_close(one, exact, atol=2e-5, rtol=2e-5)
                torch.testing.assert_close(other, exact.transpose(1, 2), atol=2e-5, rtol=2e-5)
    assert replays


def turned_copy(x):
    """A copy of other strides."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize(
    "pack", [turned_copy, lambda x: x.double(), lambda x: x], ids=["strides", "dtype", "none"]
)
@pytest.mark.parametrize("which", ["all", "one"])
def test_hooks_may_replace_the_saved_tensors_of_a_call_that_is_known(which, pack, replays):
    def unpack(x):
        return x.float()

    inputs = [torch.randn(1, 20, 2, 16, requires_grad=True) for _ in range(3)]
    dout = torch.randn(1, 20, 2, 16)
    wanted = torch.autograd.grad(fk.reference.attention(*inputs), inputs, dout)
    for hooked in (False, False, False, True, False, True, True, True):
        if hooked and which == "all":
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                out = fk.flash_attn_func(*inputs)
        else:
            out = fk.flash_attn_func(*inputs)
            if hooked:
                out.grad_fn._raw_saved_tensors[1].register_hooks(pack, unpack)
        got = torch.autograd.grad(out, inputs, dout)
        for one, exact in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, exact, atol=2e-5, rtol=2e-5)
    assert len(replays) >= 6


def test_data_that_lies_otherwise_in_the_backward_is_read_as_it_lies():
    for turn in range(6):
        inputs = [torch.randn(1, 20, 2, 16, requires_grad=True) for _ in range(3)]
        dout = torch.randn(1, 20, 2, 16)
        wanted = torch.autograd.grad(fk.reference.attention(*inputs), inputs, dout)
        out = fk.flash_attn_func(*inputs)
        if turn > 2:
            inputs[1].data = turned_copy(inputs[1].data)
        for one, exact in zip(torch.autograd.grad(out, inputs, dout), wanted, strict=True):
            torch.testing.assert_close(one, exact, atol=2e-5, rtol=2e-5)


def test_without_a_bias_no_gradient_of_one_is_allocated():
    inputs = [torch.randn(1, 20, 2, 16, requires_grad=True) for _ in range(3)]
    for _ in range(3):
        torch.autograd.grad(fk.flash_attn_func(*inputs), inputs, torch.ones(1, 20, 2, 16))
    counts = [x.results for x in eager._KNOWN.values() if type(x) is Interpreted]
    assert sorted(counts) == [2, 3]  # out, lse; dq, dk, dv


def test_autocast_is_heeded_by_a_call_that_is_known_without_it_and_the_other_way_round():
    x, y = torch.randn(1, 20, 2, 16), torch.randn(1, 1, 20, 16)
    for _ in range(4):
        for function, tensor in ((fk.flash_attn_func, x), (fk.scaled_dot_product_attention, y)):
            assert function(tensor, tensor, tensor).dtype == torch.float32
            with torch.autocast("cpu", torch.float16):
                assert function(tensor, tensor, tensor).dtype == torch.float16
                assert function(*[tensor.half()] * 3).dtype == torch.float16


@pytest.mark.parametrize("causal", [False, True])
def test_torchs_signature_is_replayed_with_its_own_layout(causal, replays):
    for _ in range(4):
        inputs = [torch.randn(2, heads, 20, 16, requires_grad=True) for heads in (4, 2, 2)]
        dout = torch.randn(2, 4, 20, 16)
        results = []
        for attention in (
            fk.scaled_dot_product_attention,
            torch.nn.functional.scaled_dot_product_attention,
        ):
            out = attention(*inputs, is_causal=causal, enable_gqa=True)
            results.append((out, *torch.autograd.grad(out, inputs, dout)))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
    assert len(replays) == 4


def test_without_gradients_a_known_call_keeps_nothing():
    inputs = [torch.randn(1, 20, 2, 16, requires_grad=True) for _ in range(3)]
    for _ in range(4):
        assert fk.flash_attn_func(*inputs).requires_grad
        with torch.no_grad():
            assert not fk.flash_attn_func(*inputs).requires_grad
        with torch.inference_mode():
            assert fk.flash_attn_func(*inputs).is_inference()


def test_a_second_derivative_is_refused_after_replays_too():
    inputs = [torch.randn(1, 20, 2, 16, requires_grad=True) for _ in range(3)]
    for _ in range(3):
        loss = fk.flash_attn_func(*inputs).sum() + inputs[0].pow(3).sum()
        (dq,) = torch.autograd.grad(loss, inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="attention has no second derivative"):
        torch.autograd.grad(dq.sum(), inputs[0])


def test_what_the_kernels_cannot_read_as_it_lies_is_copied_each_time(replays):
    x = torch.randn(1, 20, 16, 2).transpose(2, 3)
    for _ in range(4):
        torch.testing.assert_close(fk.flash_attn_func(x, x, x), fk.reference.attention(x, x, x))
    assert not replays


def test_few_signatures_are_remembered(monkeypatch):
    monkeypatch.setattr(eager._KNOWN, "most", 3)
    for length in range(1, 9):
        x = torch.randn(1, length, 1, 16)
        fk.flash_attn_func(x, x, x)
        assert len(eager._KNOWN) <= 3


@pytest.mark.parametrize("kind", ["causal document", "shuffled"])
def test_a_call_with_a_planned_mask_is_checked_once(kind, replays, monkeypatch):
    case, checks = Case(1, 33, 33, 2, 1, 16, kind), []
    options_of = attend.options_of
    monkeypatch.setattr(
        attend, "options_of", lambda *args: (checks.append(1), options_of(*args))[1]
    )
    mask = case._intervals("cpu").planned(16, torch.float32)
    for _ in range(4):
        q, k, v = (torch.randn(1, 33, heads, 16, requires_grad=True) for heads in (2, 1, 1))
        got, wanted = (
            fk.flash_attn_func(q, k, v, mask=mask),
            fk.reference.attention(q, k, v, mask=mask),
        )
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
        dout = torch.randn_like(got)
        for ours_, exact in zip(
            *(torch.autograd.grad(out, (q, k, v), dout) for out in (got, wanted)), strict=True
        ):
            torch.testing.assert_close(ours_, exact, atol=2e-5, rtol=2e-5)
    assert len(checks) == 1
    assert len(replays) == 4
    other = case._intervals("cpu").planned(16, torch.float32)
    rows = torch.full_like(other.queries, 0)  # of the same form: what it holds is read at each call
    assert not fk.flash_attn_func(q, k, v, mask=other._replace(queries=rows)).any()
