"""fla-core's kernels compute packed documents as the plain recurrence does in float64, within
bfloat16's rounding, with gradients and with the states that pass between devices.

Sizes are those of Qwen3.5 (gated delta rule), Kimi Linear (by channels) and Nemotron 3 Nano.
"""

from __future__ import annotations

import pytest
import torch
from gpu_checks import DEVICE, NEEDS_GPU
from torch import Tensor

from flashtrain_kernels import recurrences
from flashtrain_kernels.recurrences import Rows, delta_rule, fla, linear_recurrence

# None of them calls attention.
pytestmark = [*NEEDS_GPU, pytest.mark.parametrize("path", ["portable"], indirect=True)]
LENGTHS = [700, 1, 64, 5, 1200, 78]  # of the first row's documents; the second row is one
TOKENS = sum(LENGTHS)
# A rounding to bfloat16 is 2^-9 of a number on average, and kernels round between products too:
# fla-core's own tests allow 0.005 for outputs and 0.008 to 0.02 for gradients.
FORWARD, BACKWARD = 0.005, 0.02


def rows() -> Rows:
    packed = torch.cat([torch.arange(length) for length in LENGTHS])
    return Rows(torch.stack((packed, torch.arange(TOKENS))).to(DEVICE))


def number(*sizes: int, scale: float = 1.0) -> Tensor:
    return torch.randn(2, TOKENS, *sizes, device=DEVICE).mul(scale).bfloat16()


def decay(*sizes: int) -> Tensor:
    """Logarithms, float32, from far-reaching ones to those that forget at once."""
    return -torch.empty(2, TOKENS, *sizes, device=DEVICE).uniform_(-7, 1).exp()


def share(*sizes: int) -> Tensor:
    return torch.rand(2, TOKENS, *sizes, device=DEVICE).bfloat16()


def case(kind: str):
    """(operator, its inputs, its parameters)."""
    torch.manual_seed(0)
    if kind == "convolution":
        weight, bias = (torch.randn(6144, *size, device=DEVICE) / 2 for size in ((4,), ()))
        run = lambda x, *given: recurrences.short_convolution(x.mT, *given, silu=True)  # noqa: E731
        return run, [number(6144)], [weight, bias]
    if kind == "state space":
        x, B, C = number(64, 64), number(8, 128, scale=0.1), number(8, 128, scale=0.1)
        dt, A, D = (
            -decay(64) / 10,
            -torch.linspace(1, 16, 64, device=DEVICE),
            torch.ones_like(x[0, 0, :, 0]),
        )
        run = lambda x, dt, B, C, A, D, rows: recurrences.state_space(x, dt, A, B, C, rows, D)  # noqa: E731
        return run, [x, dt, B, C], [A, D.float()]
    if kind == "decayed sum":  # MiniMax's rates, of heads without groups
        rates = -torch.linspace(0.004, 0.7, 64, device=DEVICE).expand(2, TOKENS, -1)
        given = [number(64, 96), rates.contiguous(), number(64, 96, scale=0.1), number(64, 96)]
        return recurrences.decayed_sum, given, []
    run = lambda *given: recurrences.gated_delta_rule(*given, normalize=True)  # noqa: E731
    if kind == "delta rule":
        return run, [number(16, 128), number(16, 128), number(32, 128), decay(32), share(32)], []
    return run, [*(number(32, 128) for _ in range(3)), decay(32, 128), share(32)], []


KINDS = ["convolution", "delta rule", "delta rule by channels", "decayed sum", "state space"]
OPERATORS = dict(zip(KINDS, [*KINDS[:4], "decayed sum"], strict=True))


def needs(kind: str) -> None:
    reason = fla.unavailable(OPERATORS[kind], torch.device(DEVICE))
    if reason is not None:
        pytest.skip(reason)


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Norm of each difference by that of what is expected."""
    assert all(one.isfinite().all() for one in found)
    return [
        float((one.detach().double() - other.detach()).norm() / other.detach().norm())
        for one, other in zip(found, expected, strict=True)
    ]


def compared(run, tensors: list[Tensor], parameters: list[Tensor]) -> list[list[float]]:
    """Errors of the results and of all gradients of run(*tensors, *parameters), which returns a
    tensor or some, by what it returns of the same numbers in float64."""
    both = []
    for wide in (False, True):
        leaves = [
            (one.double() if wide else one).detach().requires_grad_()
            for one in (*tensors, *parameters)
        ]
        found = run(*leaves)
        found = [found] if isinstance(found, Tensor) else list(found)
        generator = torch.Generator(DEVICE).manual_seed(1)
        weights = [torch.randn(one.shape, generator=generator, device=DEVICE) for one in found]
        loss = sum(
            (one * weight.to(one)).sum(dtype=torch.float64)
            for one, weight in zip(found, weights, strict=True)
        )
        both.append((found, list(torch.autograd.grad(loss, leaves))))
    (found, gradients), (expected, wanted) = both
    return [errors(found, expected), errors(gradients, wanted)]


def of_kind(kind: str) -> list[list[float]]:
    run, tensors, parameters = case(kind)
    packed = rows()
    return compared(lambda *given: run(*given, packed), tensors, parameters)


def of_states(kind: str) -> list[list[float]]:
    """Also of documents' initial and final states, with columns beside the values as between
    devices."""
    _, tensors, _ = case(kind)
    tensors, packed = [one[:1] for one in tensors], Rows(rows().positions[:1])
    gated = kind != "decayed sum"
    heads, values, keys = (tensors[2] if gated else tensors[0]).shape[2:] + tensors[0].shape[3:]
    extra = keys if gated else 0
    shape = (len(LENGTHS), heads, keys, values + extra)
    initial = torch.randn(shape, device=DEVICE) / 8

    def run(*given: Tensor):
        *given, state = given
        wide = given[0].dtype == torch.float64
        if not gated:
            plain = linear_recurrence._chunked if wide else fla.decayed_sum
            return plain(*given, packed, state)
        given[2] = torch.nn.functional.pad(given[2], (0, extra))
        plain = delta_rule._chunked if wide else fla.gated_delta_rule
        return plain(*given, packed, True, state)

    return compared(run, [*tensors, initial], [])


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_the_plain_recurrence_with_gradients(kind):
    needs(kind)
    forward, backward = of_kind(kind)
    assert max(forward) < FORWARD
    assert max(backward) < BACKWARD


@pytest.mark.parametrize("kind", KINDS[1:4])
def test_states_that_enter_and_leave_documents_are_the_plain_recurrence_s(kind):
    needs(kind)
    forward, backward = of_states(kind)
    assert max(forward) < FORWARD
    assert max(backward) < BACKWARD


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_another_document_passes_not_even_nan(kind):
    needs(kind)
    run, tensors, parameters = case(kind)
    expected = run(*tensors, *parameters, rows())
    broken = [one.clone() for one in tensors]
    for one in broken:
        one[0, : LENGTHS[0]] = torch.nan
    found = run(*broken, *parameters, rows())
    if kind == "convolution":  # (B, D, S)
        found, expected = found.mT, expected.mT
    torch.testing.assert_close(found[0, LENGTHS[0] :], expected[0, LENGTHS[0] :], rtol=0, atol=0)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)
