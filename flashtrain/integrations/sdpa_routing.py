"""Routing of torch's scaled_dot_product_attention calls to our kernels within a context.

    with route_sdpa() as routing:
        loss = model(batch)   # any code that calls torch.nn.functional.scaled_dot_product_attention
        loss.backward()
    print(routing)            # routed 24 calls; left 2 to torch: head dimension 512 (2)

Shapes, as in torch's documentation: L queries, S keys, E head dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashtrain_kernels
from flashtrain_kernels.arguments import MAX_HEAD_DIM
from flashtrain_kernels.environment import autocast_dtype

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CPU_DTYPES = (*DTYPES, torch.float64)
TORCHS = F.scaled_dot_product_attention


# torch 2.13's own switch, torch.nn.attention.activate_flash_attention_impl, is for CUDA alone,
# reached only by calls in 16 bits without attn_mask, and counts nothing.
class route_sdpa:  # noqa: N801  (used like a function: with route_sdpa(): ...)
    """Context manager within which scaled_dot_product_attention calls run on our kernels
    where these support them.

    The function in torch.nn.functional is replaced for all threads of the process;
    nn.MultiheadAttention calls it too. A name imported earlier (from torch.nn.functional import
    ...) stays torch's. Results equal torch's up to rounding, except that a query without visible
    keys gives 0, and that dropout draws its own random numbers. Left to torch: other devices, GPUs
    before sm_80, dtypes other than float16, bfloat16 and float32, head dimensions over 512, empty,
    nested and subclassed tensors, torch.func transforms, and calls that our function rejects.

    With activation checkpointing, keep the context open during the backward, which
    recomputes the forward. A function compiled by torch.compile within the context has the
    kernels in its graph, and another version outside; its calls are not counted. Of nested
    contexts the inner one applies.

    Args:
        devices: Device types to route; ("cuda", "cpu") also computes CPU tensors by
            flashtrain_kernels, for tests.

    Attributes:
        routed: The number of calls that ran on our kernels.
        left: A Counter of the calls that torch computed, by the reason. str(routing)
            gives both in one line.
    """

    def __init__(self, devices: Iterable[str] = ("cuda",)) -> None:
        self.devices = tuple(devices)
        self.routed = 0
        self.left: Counter[str] = Counter()
        self._before: list[Callable[..., Tensor]] = []

    def __enter__(self) -> route_sdpa:
        self._before.append(F.scaled_dot_product_attention)
        F.scaled_dot_product_attention = self._decided
        return self

    def __exit__(self, *raised: Any) -> None:
        F.scaled_dot_product_attention = self._before.pop()

    def __str__(self) -> str:
        left = ", ".join(f"{reason} ({count})" for reason, count in self.left.most_common())
        return (
            f"routed {self.routed} calls; left {self.left.total() if left else 0} to "
            f"torch{': ' if left else ''}{left}"
        )

    def _decided(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute one call by our kernels, or by torch, and count it."""
        try:
            q, k, v = _arguments(*args, **kwargs)
        except TypeError:
            return TORCHS(*args, **kwargs)  # raises torch's own error
        reason = _reason(q, k, v, self.devices)
        if torch.compiler.is_compiling():  # no counts and no catching of errors
            return (TORCHS if reason else flashtrain_kernels.scaled_dot_product_attention)(
                *args, **kwargs
            )
        if reason is None:
            try:
                out = flashtrain_kernels.scaled_dot_product_attention(*args, **kwargs)
            except (TypeError, ValueError) as refusal:  # raised before anything is launched
                reason = f"refused: {refusal}"
            else:
                self.routed += 1
                return out
        self.left[reason] += 1
        return TORCHS(*args, **kwargs)


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query, key, value


def _reason(q: Tensor, k: Tensor, v: Tensor, devices: tuple[str, ...]) -> str | None:
    """Return in words why torch computes a call (None: our kernels do)."""
    for x in (q, k, v):
        if type(x) not in (Tensor, nn.Parameter) or x.is_nested:
            return (
                f"a {type(x).__name__}" if not getattr(x, "is_nested", False) else "a nested tensor"
            )
    device = q.device
    if device.type not in devices:
        return f"tensors on {device.type}"
    if k.device != device or v.device != device:
        return "tensors on several devices"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "a GPU before sm_80"
    known = DTYPES if device.type == "cuda" else CPU_DTYPES
    dtype = _computed_in(q)
    if dtype not in known:
        return f"dtype {str(q.dtype).removeprefix('torch.')}"
    if _computed_in(k) != dtype or _computed_in(v) != dtype:
        return "tensors of several dtypes"
    if (width := max(q.shape[-1], v.shape[-1])) > MAX_HEAD_DIM:
        return f"head dimension {width}"
    if 0 in q.shape or 0 in k.shape:
        return "an empty tensor"
    if (
        not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return "a torch.func transform"
    return None


def _computed_in(x: Tensor) -> torch.dtype:
    """The dtype that torch would compute in: autocast's for floating-point
    tensors other than float64."""
    return (autocast_dtype(x.device.type) if x.dtype in DTYPES else None) or x.dtype
