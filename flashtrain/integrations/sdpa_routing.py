"""torch's scaled_dot_product_attention calls, sent through our kernels while a context is open.

    with route_sdpa() as routing:
        loss = model(batch)                  # any code that calls torch.nn.functional.scaled_dot_product_attention
        loss.backward()
    print(routing)                           # routed 24 calls; left 2 to torch: head dimension 512 (2)

L queries, S keys, E head dim, as in torch's documentation.
"""

from __future__ import annotations

import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable
from contextvars import ContextVar, Token
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import flashtrain_kernels
from flashtrain.errors import UserError
from flashtrain_kernels.environment import autocast_dtype

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CPU_DTYPES = (*DTYPES, torch.float64)
MAX_HEAD_DIM = 256

# Whose rules the calls of the current asyncio task or thread go by: False where no context was opened, None within a
# call that is being decided, so that nested contexts do not decide it again.
_current: ContextVar[route_sdpa | bool | None] = ContextVar("flashtrain_route_sdpa", default=False)


# torch 2.13's own switch, torch.nn.attention.activate_flash_attention_impl, is for a whole process and for CUDA alone,
# reached only by calls in 16 bits without attn_mask, and counts nothing.
class route_sdpa(TorchFunctionMode):  # noqa: N801  (used like a function: with route_sdpa(): ...)
    """While open, scaled_dot_product_attention calls run on our kernels where those apply; the rest stays torch's.

    devices: device types of the tensors to route, "cuda" by default; ("cuda", "cpu") also computes CPU tensors by
    flashtrain_kernels, for tests.

    Found are calls by any name (F.scaled_dot_product_attention, a name imported before), also those within
    nn.MultiheadAttention. Results are those of torch up to rounding, except that a row whose every key is hidden gives
    0, and that dropout draws its own random numbers. Left to torch: other devices, GPUs before sm_80, dtypes other
    than float16, bfloat16 and float32, head dimensions over 256, empty, nested and subclassed tensors, torch.func
    transforms, torch.jit traces, and everything our function refuses.

    routed: how many calls were; left: a Counter of reasons for those that were not. str() gives both in one line.

    Threads and asyncio tasks each have their own: a context open in one routes nothing in another. Nested, the inner
    one decides. Every other torch call costs a microsecond or two more on the host while a context is open. With
    activation checkpointing, keep the context open for the backward too, which calls the forward again (also on the
    threads of autograd, which take part in it).

    torch.compile: a compiled function that is called within the context is traced through it, so the kernels become
    part of its graph (compiled code notices whether it is called inside or outside, and has a version for each). Such
    calls are counted neither as routed nor as left; those of nn.MultiheadAttention stay torch's.

    UserError: devices that are not device types.
    """

    def __init__(self, devices: Iterable[str] = ("cuda",)) -> None:
        super().__init__()
        names = (devices,) if isinstance(devices, str) else tuple(devices)
        if not names or any(name not in ("cuda", "cpu") for name in names):
            raise UserError(f"devices must be of 'cuda' and 'cpu', not {devices!r}.")
        self.devices = names
        self.routed = 0
        self.left: Counter[str] = Counter()
        self._tokens: list[Token[route_sdpa | bool | None]] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> route_sdpa:
        self._thread = threading.get_ident()
        self._tokens.append(_current.set(self))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        _current.reset(self._tokens.pop())

    def __str__(self) -> str:
        left = ", ".join(f"{reason} ({count})" for reason, count in self.left.most_common())
        return (
            f"routed {self.routed} calls; left {self.left.total() if left else 0} to torch{': ' if left else ''}{left}"
        )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return self._traced(*args, **kwargs) if func is F.scaled_dot_product_attention else func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._decided(*args, **kwargs)
        if func in _UNCHECKED and all(kind in (Tensor, nn.Parameter) for kind in types):
            # torch switches a mode off while the mode handles a call; what these call is to be found too.
            super().__enter__()
            try:
                return _UNCHECKED[func](*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        return func(*args, **kwargs)

    def _traced(self, *args: Any, **kwargs: Any) -> Tensor:
        """One call while torch.compile traces: no counts and no catching of errors."""
        q, k, v = _arguments(*args, **kwargs)
        if _reason(q, k, v, self.devices) is not None:
            return F.scaled_dot_product_attention(*args, **kwargs)
        return flashtrain_kernels.scaled_dot_product_attention(*args, **kwargs)

    def _decided(self, *args: Any, **kwargs: Any) -> Tensor:
        """One call: by our kernels, or by torch with the reason counted."""
        routing = _current.get()
        if routing is False and threading.get_ident() != self._thread:
            routing = self  # a thread of autograd, which has the modes of the thread that called backward
        if not isinstance(routing, route_sdpa):
            return F.scaled_dot_product_attention(*args, **kwargs)
        token = _current.set(None)
        try:
            try:
                q, k, v = _arguments(*args, **kwargs)
            except TypeError:
                return F.scaled_dot_product_attention(*args, **kwargs)  # which says what is wrong
            reason = _reason(q, k, v, routing.devices)
            if reason is None:
                try:
                    out = flashtrain_kernels.scaled_dot_product_attention(*args, **kwargs)
                except (TypeError, ValueError) as refusal:  # raised before anything is launched
                    reason = f"refused: {refusal}"
                else:
                    routing.routed += 1
                    return out
            routing.left[reason] += 1
            return F.scaled_dot_product_attention(*args, **kwargs)
        finally:
            _current.reset(token)


def _arguments(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query, key, value


def _reason(q: Tensor, k: Tensor, v: Tensor, devices: tuple[str, ...]) -> str | None:
    """Why a call stays torch's; None when it does not."""
    for x in (q, k, v):
        if type(x) not in (Tensor, nn.Parameter) or x.is_nested:
            return f"a {type(x).__name__}" if not getattr(x, "is_nested", False) else "a nested tensor"
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
    if not torch.compiler.is_compiling():
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return "a torch.func transform"
        if torch.jit.is_tracing():
            return "a torch.jit trace"
    return None


def _computed_in(x: Tensor) -> torch.dtype:
    """The dtype torch would compute in: autocast's for floating-point tensors but float64."""
    return (autocast_dtype(x.device.type) if x.dtype in DTYPES else None) or x.dtype


def _unchecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch's own function without asking whether a mode wants to handle the call: the same code, nothing patched."""
    never = dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), lambda *_: False
    )
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **never},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# Functions in Python that ask modes and call attention, or recompute a forward pass that does.
_UNCHECKED = {
    function: _unchecked(function)
    for function in (F.multi_head_attention_forward, Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}
