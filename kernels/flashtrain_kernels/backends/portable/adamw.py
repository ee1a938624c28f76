"""The kernel of AdamW's step: one pass over the gradients, float32 parameters, moments and
half-precision weights of many tensors, which it finds through a table of their addresses."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, ceil_div

CHUNK = 16384  # elements of a program
BLOCK = 1024  # of an iteration: 8 of each tensor a thread
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Update(NamedTuple):
    """A parameter's tensors in a step: of one size, contiguous, float32 but for the first two."""

    gradient: Tensor
    weight: Tensor | None  # gets the parameter rounded to its dtype
    parameter: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor  # a scalar on the device, with this step counted

    def kind(self) -> tuple[Any, ...]:
        """Return what the tensors of a launch share: the device, dtypes, and whether all of them
        are whole groups of four elements, 16 bytes aligned."""
        together = self.gradient.numel() * 4
        for one in self[:5]:
            together |= 0 if one is None else one.data_ptr()
        weight = None if self.weight is None else TYPES[self.weight.dtype]
        return self.gradient.device, TYPES[self.gradient.dtype], weight, together % 16 == 0


@triton.jit
def _pointer(address_ptr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(address_ptr).to(tl.pointer_type(TYPE))
    if ALIGNED:  # to four elements, so that a thread has the same elements of every tensor
        pointer = tl.multiple_of(pointer, TYPE.primitive_bitwidth // 2)
    return pointer


@triton.jit(do_not_specialize=["tensors"])
def adamw_kernel(
    table_ptr, factor_ptr, power1_ptr, power2_ptr, tensors, lr, beta1, beta2, eps, weight_decay,
    GRADIENT: tl.constexpr, WEIGHT: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr,
    TENSORS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Kernel: one program updates CHUNK elements of one tensor.

    A row of the table (tensors, 7): a tensor's first program, its size, and the addresses of
    gradient, weight, parameter and both moments. power1, power2: its beta1 and beta2 ** step. It
    rounds as torch's fused AdamW on CUDA does (fused_adam_utils.cuh, torch 2.11 on): hence each
    fma, the exact square root and the exact divisions.
    """
    rows = tl.arange(0, TENSORS)
    starts = tl.load(table_ptr + rows * 7, mask=rows < tensors, other=2**62)
    # The tensor that this program is of: the last one that begins here or before.
    tensor = tl.sum((starts <= tl.program_id(0)).to(tl.int32), 0) - 1
    row = table_ptr + tensor * 7
    size = tl.load(row + 1)
    if ALIGNED:
        size = tl.multiple_of(size, 4)
    gradient_ptr = _pointer(row + 2, GRADIENT, ALIGNED)
    parameter_ptr = _pointer(row + 4, tl.float32, ALIGNED)
    exp_avg_ptr = _pointer(row + 5, tl.float32, ALIGNED)
    exp_avg_sq_ptr = _pointer(row + 6, tl.float32, ALIGNED)
    step_size = tl.div_rn(lr, 1.0 - tl.load(power1_ptr + tensor))
    correction2 = tl.sqrt_rn(1.0 - tl.load(power2_ptr + tensor))
    decay = lr * weight_decay
    first = (tl.program_id(0) - tl.load(row)) * CHUNK
    for at in range(first, tl.minimum(first + CHUNK, size), BLOCK):
        offset = at + tl.arange(0, BLOCK)
        mask = offset < size
        gradient = tl.load(gradient_ptr + offset, mask=mask).to(tl.float32)
        parameter = tl.load(parameter_ptr + offset, mask=mask)
        exp_avg = tl.load(exp_avg_ptr + offset, mask=mask)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + offset, mask=mask)
        if SCALED:
            gradient *= tl.load(factor_ptr)
        square = gradient * gradient
        parameter = tl.fma(-decay, parameter, parameter)
        exp_avg = tl.fma(beta1, exp_avg, tl.fma(-beta1, gradient, gradient))
        exp_avg_sq = tl.fma(beta2, exp_avg_sq, tl.fma(-beta2, square, square))
        denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), correction2) + eps
        parameter -= tl.div_rn(step_size * exp_avg, denominator)
        tl.store(parameter_ptr + offset, parameter, mask=mask)
        tl.store(exp_avg_ptr + offset, exp_avg, mask=mask)
        tl.store(exp_avg_sq_ptr + offset, exp_avg_sq, mask=mask)
        if WEIGHT is not None:
            weight_ptr = _pointer(row + 3, WEIGHT, ALIGNED)
            tl.store(weight_ptr + offset, parameter.to(WEIGHT), mask=mask)


def adamw_launch(
    updates: Sequence[Update], factor: Tensor | None, lr: float, beta1: float, beta2: float,
    eps: float, weight_decay: float,
) -> Launch:  # fmt: skip
    """Return the launch that makes AdamW's step for updates of one kind, with gradients multiplied
    by `factor` (a float32 scalar on the device; None: 1). The host does not wait for the device."""
    rows, programs = [], 0
    for one in updates:
        addresses = [0 if x is None else x.data_ptr() for x in one[:5]]
        rows.append([programs, one.gradient.numel(), *addresses])
        programs += ceil_div(one.gradient.numel(), CHUNK)
    device, gradient, weight, aligned = updates[0].kind()
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    table = table.to(device, non_blocking=True)
    steps = torch.stack([one.step for one in updates])
    scale = steps if factor is None else factor.to(device)
    rates = (lr, beta1, beta2, eps, weight_decay)
    constants = {
        "GRADIENT": gradient, "WEIGHT": weight, "SCALED": factor is not None, "ALIGNED": aligned,
        "TENSORS": 1 << (len(rows) - 1).bit_length(), "CHUNK": CHUNK, "BLOCK": BLOCK,
    }  # fmt: skip
    args = (table, scale, beta1**steps, beta2**steps, len(rows), *map(float, rates))
    return Launch(adamw_kernel, (programs,), args, constants, {"num_warps": 4})
