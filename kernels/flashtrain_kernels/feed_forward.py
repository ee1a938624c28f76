"""A Transformer's GELU feed-forward with the activation computed inside its matrix products.

T tokens, E embedding width, F width inside.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from . import cublaslt
from .environment import autocast_dtype

ALIGNED = 8  # elements that a fused product's sizes must be multiples of (16 bytes)

for _name, _schema in (
    ("linear_gelu", "(Tensor x, Tensor weight, Tensor bias) -> (Tensor, Tensor)"),
    ("product_times_gelu_gradient", "(Tensor dout, Tensor weight, Tensor inner) -> Tensor"),
):
    torch.library.define(f"flashtrain_kernels::{_name}", _schema, tags=torch.Tag.pt2_compliant_tag)
_LINEAR_GELU = torch.ops.flashtrain_kernels.linear_gelu.default
_PRODUCT = torch.ops.flashtrain_kernels.product_times_gelu_gradient.default


def gelu_feed_forward(
    x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor
) -> Tensor:
    """Compute F.linear(F.gelu(F.linear(x, up, up_bias), approximate="tanh"), down,
    down_bias), differentiable once.

    On NVIDIA GPUs in 16 bits, GELU and its derivative are fused into the
    matrix products (cuBLASLt).

    Args:
        x: (..., E), floating; under autocast, computed in its dtype.
        up, up_bias: weight (F, E) and bias (F,) of the first linear layer.
        down, down_bias: weight (E, F) and bias (E,) of the second.

    Returns:
        (..., E).
    """
    cast = autocast_dtype(x.device.type)
    dtype = cast or x.dtype
    rows = x.reshape(-1, x.shape[-1]).to(dtype)
    with nullcontext() if cast is None else torch.autocast(x.device.type, enabled=False):
        out = _FeedForward.apply(rows, *(p.to(dtype) for p in (up, up_bias, down, down_bias)))
    return out.view(*x.shape[:-1], down.shape[0])


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor
    ) -> Tensor:
        out, inner = _LINEAR_GELU(x, up, up_bias)
        ctx.save_for_backward(x, up, down, out, inner)
        return torch.addmm(down_bias, out, down.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        x, up, down, out, inner = ctx.saved_tensors
        dinner = _PRODUCT(dy, down, inner)
        return dinner @ up, dinner.mT @ x, dinner.sum(0), dy.mT @ out, dy.sum(0)


def _is_fused(x: Tensor, *sizes: int) -> bool:
    half = x.dtype in (torch.float16, torch.bfloat16)
    return (
        x.is_cuda
        and half
        and x.shape[0] > 0
        and not any(n % ALIGNED for n in sizes)
        and cublaslt.available()
    )


@torch.library.impl("flashtrain_kernels::linear_gelu", ("cpu", "cuda"))
def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """gelu(inner) and inner = x @ weight.T + bias, both (T, F)."""
    if not _is_fused(x, *weight.shape):
        inner = torch.addmm(bias, x, weight.mT)
        return F.gelu(inner, approximate="tanh"), inner
    # An operator's results share no memory.
    out, inner = (x.new_empty(x.shape[0], weight.shape[0]) for _ in range(2))
    cublaslt.linear_gelu(x.contiguous(), weight.contiguous(), bias.contiguous(), out, inner)
    return out, inner


@torch.library.impl("flashtrain_kernels::product_times_gelu_gradient", ("cpu", "cuda"))
def _product_times_gelu_gradient(dout: Tensor, weight: Tensor, inner: Tensor) -> Tensor:
    """(dout @ weight) * gelu'(inner): dout (T, E), weight (E, F), inner (T, F)."""
    if not _is_fused(dout, *weight.shape):
        return torch.ops.aten.gelu_backward(dout @ weight, inner, approximate="tanh")
    dinner = torch.empty_like(inner)
    cublaslt.product_times_gelu_gradient(dout.contiguous(), weight.contiguous(), inner, dinner)
    return dinner


@torch.library.register_fake("flashtrain_kernels::linear_gelu")
def _fake_linear_gelu(x, weight, bias):
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], weight.shape[0])


@torch.library.register_fake("flashtrain_kernels::product_times_gelu_gradient")
def _fake_product(dout, weight, inner):
    return torch.empty_like(inner)


@register_flop_formula(torch.ops.flashtrain_kernels.linear_gelu)
def _linear_gelu_flops(x, weight, bias, **kwargs: Any) -> int:
    return 2 * x[0] * weight[0] * weight[1]


@register_flop_formula(torch.ops.flashtrain_kernels.product_times_gelu_gradient)
def _product_flops(dout, weight, inner, **kwargs: Any) -> int:
    return 2 * dout[0] * weight[0] * weight[1]
