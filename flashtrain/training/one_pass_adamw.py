"""AdamW whose step, on an NVIDIA GPU, passes over memory once, with clipping and rounding in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flashtrain_kernels.environment import INTERPRETED, release
from flashtrain_kernels.launch_cache import on_device

HALF = (torch.bfloat16, torch.float16)
_OTHERS = ("amsgrad", "maximize", "capturable", "differentiable")  # which the kernel lacks
_STATES = ("exp_avg", "exp_avg_sq", "step")


class OnePassAdamW(torch.optim.AdamW):
    """torch's fused AdamW, with a kernel that also scales gradients and rounds weights.

    Where the kernel serves (float32 parameters on NVIDIA GPUs from sm_80 on; FSDP2's shards too),
    parameters, moments and step counts get the bits that torch's gives them, but that scaled
    gradients are not rounded. Elsewhere a step is torch's. The saved state is torch's.
    """

    # The half-precision weight of each parameter that is its float32 copy: its gradient is read,
    # and the new copy is rounded into it.
    weights: Mapping[Tensor, Tensor] = {}
    _factor: Tensor | None = None

    def scale_gradients(self, factor: Tensor) -> bool:
        """Have the next step multiply all gradients by a float32 scalar on their device. Return
        False if the caller must do so, in place."""
        self._factor = factor if self._has_kernel() else None
        return self._factor is not None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, if any, then make a step; return the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.step_in_one_pass():
            super().step()
        return loss

    @torch.no_grad()
    def step_in_one_pass(self) -> bool:
        """Make a step by the kernel if it serves all parameters that have a gradient. Else multiply
        the gradients by the factor of `scale_gradients`, and return False."""
        factor, self._factor = self._factor, None
        found = list(self._updates()) if self._has_kernel() else []
        if not found or not all(_serves(tensors) for _, tensors in found):
            for _, (gradient, *_) in self._updates() if factor is not None else ():
                gradient.mul_(factor)
            return False
        from flashtrain_kernels.backends.portable.adamw import Update, adamw_launch

        torch._foreach_add_([tensors[-1] for _, tensors in found], 1)
        launches: dict[tuple[Any, ...], list[Update]] = {}
        for rates, tensors in found:
            one = Update(*tensors)
            if one.gradient.numel():  # FSDP2 has empty shards
                launches.setdefault((rates, *one.kind()), []).append(one)
        for (rates, device, *_), updates in launches.items():
            with on_device(device):
                adamw_launch(updates, factor, *rates).run()
        return True

    def _has_kernel(self) -> bool:
        # It does not undo fp16's loss scaling.
        return getattr(self, "found_inf", None) is None and all(
            group["fused"]
            and not any(group[name] for name in _OTHERS)
            and not any(isinstance(one, Tensor) for one in (group["lr"], *group["betas"]))
            and all(_runs(one.device) for one in group["params"][:1])
            for group in self.param_groups
        )

    def _updates(self) -> Iterator[tuple[tuple[float, ...], list[Any]]]:
        """Yield the rates of each parameter that has a gradient, and the tensors of its Update."""
        for group in self.param_groups:
            rates = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
            for one in group["params"]:
                weight = self.weights.get(one)
                gradient = (one if weight is None else weight).grad
                if gradient is None:
                    continue
                state = self.state[one]
                if not state:  # as torch makes it
                    state["step"] = torch.zeros((), dtype=torch.float32, device=one.device)
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = torch.zeros_like(one, memory_format=torch.preserve_format)
                tensors = [gradient, weight, one, *[state[name] for name in _STATES]]
                if isinstance(one, DTensor):
                    tensors = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
                yield rates, tensors


def _runs(device: torch.device) -> bool:
    if device.type == "cuda":
        return release() > (0, 0) and torch.cuda.get_device_capability(device) >= (8, 0)
    return INTERPRETED and device.type == "cpu"


def _serves(tensors: list[Any]) -> bool:
    gradient, weight, *exact = tensors
    known = gradient.dtype in (torch.float32, *HALF) and (weight is None or weight.dtype in HALF)
    dense = gradient.is_contiguous() and (weight is None or weight.is_contiguous())
    return known and dense and all(x.dtype == torch.float32 and x.is_contiguous() for x in exact)
