"""A language model's output head and loss in one operator, computed for a
chunk of tokens at a time.

T tokens, E embedding width, V rows of the weight. The idea is Liger Kernel's (Hsu et al. 2024,
arXiv 2410.10989); here the weight's gradient is added up in float32.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from .environment import INTERPRETED, autocast_dtype, forced_implementation

IGNORED = -100  # of a position without a target: the default ignore_index of torch's cross_entropy
PIECE = 2**29  # logits a piece: 1 GiB in bfloat16

_NAME = "flashtrain_kernels::linear_cross_entropy"
torch.library.define(
    _NAME,
    "(Tensor hidden, Tensor weight, Tensor labels, int vocab_size, int ignored, SymInt chunk, "
    "bool gradients, float softcap=0.0, bool frozen=False) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
LINEAR_CROSS_ENTROPY = torch.ops.flashtrain_kernels.linear_cross_entropy.default

# Its backward is itself, given the losses' gradients.
_EACH = "flashtrain_kernels::linear_token_losses"
torch.library.define(
    _EACH,
    "(Tensor hidden, Tensor weight, Tensor labels, int vocab_size, int ignored, SymInt chunk, "
    "Tensor? dlosses, float softcap=0.0, bool frozen=False) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
TOKEN_LOSSES = torch.ops.flashtrain_kernels.linear_token_losses.default


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int | None = None,
    ignore_index: int = IGNORED,
    chunk: int | None = None,
    reduction: str = "mean",
    softcap: float = 0.0,
) -> Tensor:
    """Compute the cross-entropy, in nats, of the logits hidden @ weight.T against labels,
    without storing all logits.

    It equals F.cross_entropy(F.linear(hidden, weight).float(), labels), also under autocast.
    Differentiable once, in hidden and weight.

    Args:
        hidden: (..., E), floating.
        weight: (V, E).
        labels: (...), int64.
        vocab_size: number of real tokens; the logits of the weight's later rows (padding)
            count as -inf. None: V.
        ignore_index: label of tokens that have no loss.
        chunk: tokens whose logits are computed at a time; None: as many as have 2^29 logits.
        reduction: "mean" over the labels that are not ignore_index (0 if there are none), "sum", or
            "none": each token's own loss, whose backward computes the logits again.
        softcap: replace logits by softcap * tanh(logits / softcap) first, as Gemma
            2 does; 0: no softcap.

    Returns:
        A scalar in float32 (float64 for float64); for "none" a tensor (...) like
        labels, 0 at ignore_index.

    Raises:
        ValueError: sizes that do not fit, an unknown reduction, a softcap below 0.
        TypeError: labels that are not int64.
        RuntimeError: a label that is no token; on a GPU a device assertion, as of F.cross_entropy.
    """
    _check(hidden, weight, labels, vocab_size, chunk, reduction)
    if softcap < 0:
        raise ValueError(f"softcap must be 0 (none) or more, not {softcap}")
    dtype = autocast_dtype(hidden.device.type) or weight.dtype
    rows = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    flat = labels.reshape(-1)
    sizes = vocab_size or weight.shape[0], ignore_index, chunk or default_chunk(weight.shape[0])
    if reduction == "none":  # no view: FSDP2 warns of those that leave a module
        return TOKEN_LOSSES(rows, weight, labels, *sizes, None, softcap)[0]
    gradients = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    total, _, _ = LINEAR_CROSS_ENTROPY(
        rows, weight, flat, *sizes, gradients, softcap, not weight.requires_grad
    )
    return total if reduction == "sum" else total / (flat != ignore_index).sum().clamp(min=1)


def default_chunk(vocab_rows: int) -> int:
    """Return the default chunk in tokens: a power of two, as many as have at most 2^29
    logits, but at least 256."""
    return max(256, 1 << ((PIECE // vocab_rows).bit_length() - 1))


def _check(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab_size: int | None,
    chunk: int | None,
    reduction: str,
) -> None:
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden and weight must be (..., E) and (V, E), not {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels must have hidden's shape {tuple(hidden.shape[:-1])}, not {tuple(labels.shape)}"
        )
    if labels.dtype != torch.int64:
        raise TypeError(f"labels must be int64, not {labels.dtype}")
    if vocab_size is not None and not 1 <= vocab_size <= weight.shape[0]:
        raise ValueError(
            f"vocab_size must be 1 to {weight.shape[0]}, the weight's rows, not {vocab_size}"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be 1 or more tokens, not {chunk}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be mean, sum or none, not {reduction!r}")


@torch.library.impl(_NAME, ("cpu", "cuda"))
@torch.library.register_fake(_NAME)
def _summed(
    hidden, weight, labels, vocab_size, ignored, chunk, gradients, softcap=0.0, frozen=False
):
    """Return (sum of the losses, gradient of hidden, gradient of weight). The gradients are empty
    unless `gradients`; frozen: the weight's is empty."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    ones = hidden.new_ones(labels.shape, dtype=dtype) if gradients else None
    losses, dhidden, dweight = TOKEN_LOSSES(
        hidden, weight, labels, vocab_size, ignored, chunk, ones, softcap, frozen
    )
    return losses.sum(), dhidden, dweight


@torch.library.impl(_EACH, ("cpu", "cuda"))
def _pieces(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, ignored: int, chunk: int,
    dlosses: Tensor | None,
    softcap: float = 0.0, frozen: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (the losses, gradient of hidden, gradient of weight), the gradients given dlosses,
    those of the losses, and empty without them; frozen: the weight's is empty."""
    known = (labels == ignored) | ((labels >= 0) & (labels < vocab_size))
    torch._assert_async(known.all(), f"labels must be 0 to {vocab_size - 1}, or {ignored} for none")
    losses = hidden.new_zeros(labels.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
    flat, labels, matrix = losses.view(-1), labels.contiguous().view(-1), weight.to(hidden.dtype)
    gradients = dlosses is not None
    dlosses = None if dlosses is None else dlosses.contiguous().view(-1)
    dhidden = (
        torch.empty_like(hidden, memory_format=torch.contiguous_format)
        if gradients
        else hidden.new_empty(0)
    )
    of_weight = gradients and not frozen
    dweight = (
        weight.new_zeros(weight.shape, dtype=losses.dtype) if of_weight else weight.new_empty(0)
    )
    # A piece's logits are computed, their gradient is written over them at once, and goes into both
    # matrix products of the backward, so that the logits of one piece are all that is kept.
    size = min(chunk, hidden.shape[0])
    logits = piece = tanh = hidden.new_empty((size, matrix.shape[0]))
    softmax_rows = _by_kernel if _runs_kernel(hidden) else _in_torch
    for start in range(0, hidden.shape[0], max(1, size)):
        at = slice(start, min(start + size, hidden.shape[0]))
        piece = torch.mm(hidden[at], matrix.mT, out=logits[: at.stop - start])
        if softcap:
            tanh = piece.div_(softcap).tanh_().clone()
            piece.mul_(softcap)
        softmax_rows(
            piece,
            labels[at],
            flat[at],
            vocab_size,
            ignored,
            None if dlosses is None else dlosses[at],
        )
        if gradients:
            if softcap:
                # The derivative of softcap * tanh(x / softcap).
                piece.mul_(tanh.square_().neg_().add_(1))
            torch.mm(piece, matrix, out=dhidden[at])
        if of_weight:
            add_product(dweight, piece.mT, hidden[at])
    del matrix, logits, piece, tanh  # before the weight's gradient may need a copy
    return losses, dhidden, dweight.to(weight.dtype)


def _runs_kernel(hidden: Tensor) -> bool:
    if hidden.dtype == torch.float64 or forced_implementation() == "reference":
        return False
    if hidden.is_cuda:
        return torch.cuda.get_device_capability(hidden.device) >= (8, 0)
    return INTERPRETED


def _by_kernel(
    logits: Tensor, labels: Tensor, losses: Tensor, vocab_size: int, ignored: int, dlosses: Any
) -> None:
    from .backends.portable.cross_entropy import softmax_rows_launch

    softmax_rows_launch(logits, labels, losses, vocab_size, ignored, dlosses).run()


def _in_torch(
    logits: Tensor, labels: Tensor, losses: Tensor, vocab_size: int, ignored: int, dlosses: Any
) -> None:
    """Compute in plain PyTorch what cross_entropy.softmax_rows_launch does: fill losses and, with
    dlosses, overwrite the logits with their gradient."""
    x = logits.to(losses.dtype)
    x[:, vocab_size:] = -torch.inf
    lse = x.logsumexp(-1, keepdim=True)
    counted = (labels != ignored)[:, None]
    at = labels[:, None].where(counted, 0)
    losses.copy_((lse - x.gather(1, at)).where(counted, 0)[:, 0])
    if dlosses is not None:
        p = (x - lse).exp_()
        p.scatter_add_(1, at, -torch.ones_like(lse))
        logits.copy_(p.mul_(dlosses[:, None]).where(counted, 0))


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to total in place; on a GPU 16-bit products are added to a float32
    total without rounding."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total += a @ b


@torch.library.register_fake(_EACH)
def _fake(hidden, weight, labels, vocab_size, ignored, chunk, dlosses, softcap=0.0, frozen=False):
    losses = hidden.new_empty(labels.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
    if dlosses is None:
        return losses, hidden.new_empty(0), weight.new_empty(0)
    dhidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    return losses, dhidden, weight.new_empty(0 if frozen else weight.shape)


class _Scaled(torch.autograd.Function):
    """Multiply the gradients dhidden and dweight by the gradient of the loss. It refuses a second
    derivative, which would need the logits again."""

    @staticmethod
    def forward(ctx: Any, scale: Tensor, dhidden: Tensor, dweight: Tensor) -> tuple[Tensor, Tensor]:
        return dhidden * scale, dweight * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "linear_cross_entropy has no second derivative; "
            "use F.linear and F.cross_entropy for one"
        )


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, dhidden, dweight = output
    ctx.mark_non_differentiable(dhidden, dweight)
    ctx.save_for_backward(dhidden, dweight)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dtotal: Tensor | None, *_: Any) -> tuple:
    if dtotal is None:
        return (None,) * 9
    dhidden, dweight = ctx.saved_tensors
    dhidden, dweight = _Scaled.apply(dtotal, dhidden, dweight)
    return (dhidden, dweight if ctx.needs_input_grad[1] else None, *(None,) * 7)


torch.library.register_autograd(_NAME, _backward, setup_context=_save)


def _save_each(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs[:3])
    ctx.sizes, ctx.softcap = inputs[3:6], inputs[7]


@once_differentiable
def _backward_of_each(ctx: Any, dlosses: Tensor, *_: Any) -> tuple:
    frozen = not ctx.needs_input_grad[1]
    _, dhidden, dweight = TOKEN_LOSSES(*ctx.saved_tensors, *ctx.sizes, dlosses, ctx.softcap, frozen)
    return (dhidden, None if frozen else dweight, *(None,) * 7)


torch.library.register_autograd(_EACH, _backward_of_each, setup_context=_save_each)


# gradients: or dlosses.
@register_flop_formula([LINEAR_CROSS_ENTROPY.overloadpacket, TOKEN_LOSSES.overloadpacket])
def _flops(
    hidden,
    weight,
    labels,
    vocab_size,
    ignored,
    chunk,
    gradients,
    softcap=0.0,
    frozen=False,
    **kwargs: Any,
) -> int:
    return 2 * hidden[0] * weight[0] * weight[1] * (1 + bool(gradients) * (1 if frozen else 2))
