"""route_sdpa: which calls of torch's scaled_dot_product_attention run on our kernels, and
that they mean the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from huggingface_models import build, tokens

import flashtrain_kernels
from flashtrain.integrations import route_sdpa

CPU = ("cpu",)


def tensors(*shape, dtype=torch.float32, count=3):
    shape = shape or (2, 3, 7, 4)
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)
    ]


@pytest.fixture
def ours(monkeypatch):
    """The calls that reach our function, which goes on working."""
    calls = []
    real = flashtrain_kernels.scaled_dot_product_attention

    def counting(*args, **kwargs):
        calls.append((args, kwargs))
        return real(*args, **kwargs)

    monkeypatch.setattr(flashtrain_kernels, "scaled_dot_product_attention", counting)
    return calls


def test_calls_are_routed_while_the_context_is_open(ours):
    q, k, v = tensors()
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert ours == []
    with route_sdpa(CPU) as routing:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.nn.functional.scaled_dot_product_attention(query=q, key=k, value=v, scale=0.3)
    torch.testing.assert_close(out, expected)
    assert len(ours) == routing.routed == 2
    assert not routing.left
    F.scaled_dot_product_attention(q, k, v)
    assert len(ours) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.7},
        {"attn_mask": torch.ones(7, 7).tril().bool()},
        {"attn_mask": torch.arange(49.0).view(7, 7) / 10},
        {"enable_gqa": True},
    ],
)
def test_results_and_gradients_are_torchs(ours, options, dtype):
    q, k, v = tensors(dtype=dtype)
    options = dict(options)
    if options.get("enable_gqa"):
        k, v = k[:, :1], v[:, :1]
    if options.get("attn_mask") is not None and options["attn_mask"].is_floating_point():
        options["attn_mask"] = options["attn_mask"].to(dtype)
    results = []
    for context in (route_sdpa(CPU), route_sdpa()):  # the second leaves CPU tensors to torch
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        with context:
            out = F.scaled_dot_product_attention(*inputs, **options)
            (out * out.detach().cos()).sum().backward()
        results.append((out, *[x.grad for x in inputs]))
    assert len(ours) == 1
    torch.testing.assert_close(*results)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's, of vmap
def test_left_calls_are_counted_by_reason():
    q, k, v = tensors()
    wide = tensors(1, 1, 4, 600)
    with route_sdpa(CPU) as routing:
        F.scaled_dot_product_attention(*wide)
        F.scaled_dot_product_attention(*wide)
        F.scaled_dot_product_attention(*tensors(0, 3, 7, 4))
        torch.func.vmap(F.scaled_dot_product_attention)(q[:, None], k[:, None], v[:, None])
        F.scaled_dot_product_attention(q, k, v)
        with route_sdpa() as inner, inner:
            F.scaled_dot_product_attention(q, k, v)
    assert routing.left == {
        "head dimension 600": 2,
        "an empty tensor": 1,
        "a torch.func transform": 1,
    }
    assert routing.routed == 1
    assert str(routing).startswith("routed 1 calls; left 4 to torch: head dimension 600 (2), ")
    assert str(inner) == "routed 0 calls; left 1 to torch: tensors on cpu (1)"
    assert str(route_sdpa()) == "routed 0 calls; left 0 to torch"


def test_what_our_function_refuses_is_left_to_torch_with_its_reason(monkeypatch):
    def refusing(*args, **kwargs):
        raise ValueError("dropout_p must be less")

    monkeypatch.setattr(flashtrain_kernels, "scaled_dot_product_attention", refusing)
    q, k, v = tensors()
    with route_sdpa(CPU) as routing:
        out = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))
    assert routing.left == {"refused: dropout_p must be less": 1}


def test_autocast_computes_in_its_dtype(ours):
    q, k, v = tensors()
    with route_sdpa(CPU), torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.scaled_dot_product_attention(q, k.bfloat16(), value=v)
    assert out.dtype == torch.bfloat16
    assert len(ours) == 1


def test_a_transformers_model_on_sdpa_is_routed(ours):
    model = build("llama", "sdpa")
    expected = model(tokens(2, 9)).logits
    with route_sdpa(CPU) as routing:
        torch.testing.assert_close(model(tokens(2, 9)).logits, expected, atol=1e-4, rtol=1e-4)
    assert routing.routed == model.config.num_hidden_layers == len(ours)


def test_compiled_code_is_routed_inside_the_context_only(monkeypatch):
    torch._dynamo.reset()
    # To be told apart.
    monkeypatch.setattr(flashtrain_kernels, "scaled_dot_product_attention", lambda q, k, v: q * 2)
    compiled = torch.compile(
        lambda *x: F.scaled_dot_product_attention(*x) + 1, backend="aot_eager", fullgraph=True
    )
    q, k, v = tensors()
    theirs = F.scaled_dot_product_attention(q, k, v) + 1
    for _ in range(2):
        torch.testing.assert_close(compiled(q, k, v), theirs)
        with route_sdpa(CPU) as routing:
            torch.testing.assert_close(compiled(q, k, v), q * 2 + 1)
        with route_sdpa():
            torch.testing.assert_close(compiled(q, k, v), theirs)
        assert (routing.routed, dict(routing.left)) == (0, {})
