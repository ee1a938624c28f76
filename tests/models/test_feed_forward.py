"""The feed-forward over pieces of the tokens: the same values and gradients, and less of
the inner width stored."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashtrain.models import feed_forward
from flashtrain.models.feed_forward import FeedForward

E, F = 12, 20
KINDS = [
    ("gelu", True),
    ("gelu", False),
    ("swiglu", True),
    ("swiglu", False),
    ("gelu_exact", True),
    ("geglu", False),
]


def build(activation: str, bias: bool, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(0)
    return FeedForward(E, F, activation, bias).to(dtype)


def results(module: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    out = module(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]


def inputs(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(
        2, 15, E, dtype=dtype, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()


@pytest.mark.parametrize(("activation", "bias"), KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 15, 29])
def test_pieces_of_any_size_give_the_value_and_gradients_of_the_whole(activation, bias, chunk):
    module, x = build(activation, bias), inputs()
    whole = results(module, x)
    module.chunk = chunk
    torch.testing.assert_close(results(module, x), whole, atol=1e-11, rtol=0)


@pytest.mark.parametrize(("activation", "bias"), [("gelu", True), ("swiglu", False)])
def test_torch_finds_the_operators_well_formed(activation, bias):
    module = build(activation, bias)
    x = inputs().detach().flatten(0, 1).requires_grad_()
    weights = (
        module.up.weight,
        module.up.bias,
        module.down.weight,
        module.down.bias,
        activation,
        7,
    )
    torch.library.opcheck(feed_forward.FEED_FORWARD, (x, *weights))
    plain = [w.detach() if isinstance(w, torch.Tensor) else w for w in (x, *weights)]
    torch.library.opcheck(feed_forward.BACKWARD, (torch.randn(30, E, dtype=torch.float64), *plain))


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_under_autocast_it_computes_as_linear_layers_do(activation):
    module, x = build(activation, True, torch.float32), inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = results(module, x)
        module.chunk = 7
        pieces = results(module, x)
    assert pieces[0].dtype == torch.bfloat16
    assert all(gradient.dtype == torch.float32 for gradient in pieces[1:])
    for ours, exact in zip(pieces, whole, strict=True):
        assert (ours - exact).norm() <= 1e-2 * exact.norm()


def test_many_pieces_add_up_their_gradients_in_float32():
    module = build("gelu", True, torch.bfloat16)
    x = (
        torch.randn(1, 4096, E, generator=torch.Generator().manual_seed(1))
        .bfloat16()
        .requires_grad_()
    )
    exact = results(build("gelu", True, torch.float64), x.detach().double().requires_grad_())
    module.chunk = 8
    for ours, wanted in zip(results(module, x), exact, strict=True):
        assert (ours - wanted).norm() <= 1.5e-2 * wanted.norm()


def test_the_inner_width_is_not_kept_for_all_tokens():
    module, x = build("gelu", True), inputs()
    sizes: list[int] = []

    def kept_by(chunk: int | None) -> int:
        sizes.clear()
        module.chunk = chunk
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (sizes.append(t.numel()), t)[1], lambda t: t
        ):
            module(x)
        return sum(sizes)

    weights = sum(parameter.numel() for parameter in module.parameters())
    assert kept_by(5) <= x.numel() + weights
    assert kept_by(None) > x.numel() + 2 * 30 * F


class Held(TorchDispatchMode):
    """The most bytes that results of operators, as long as a tensor has them, took at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in self.sizes:
            place = found.untyped_storage().data_ptr()
            self.sizes[place] = found.untyped_storage().nbytes()
            weakref.finalize(found, self.sizes.pop, place, None)
            self.most = max(self.most, sum(self.sizes.values()))
        return found


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_a_piece_of_a_gated_one_holds_four_tensors_of_the_inner_width(activation):
    """Gate and value, in whose place their gradients come; the inner gradient,
    and the activated gate's."""
    tokens, embed, ffn, pieces = 4096, 8, 64, 3
    x, dy = torch.randn(2, tokens * pieces, embed)
    up, down = torch.randn(2 * ffn, embed), torch.randn(embed, ffn)
    with Held() as held:
        feed_forward._backward(dy, x, up, None, down, None, activation, tokens)
    narrow = x.nbytes + 2 * (tokens * embed * 4) + 3 * (up.nbytes + down.nbytes)
    assert 4 * tokens * ffn * 4 <= held.most <= 4 * tokens * ffn * 4 + narrow
