"""LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning", arXiv 1904.00962): Adam's update, scaled for
each parameter tensor to the size of its weights, so that batches of tens of thousands train."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.training.optimizers import parameter_groups

AT_ONCE = 2**26  # elements of the parameters updated together: what two temporaries of each are taken for


class Lamb(torch.optim.Optimizer):
    """LAMB's algorithm 2 with Adam's bias correction, many tensors a launch, waiting for nothing.

    m and v are Adam's moments; u = m' / (sqrt(v') + eps) + weight_decay * w, of the corrected ones; then
    w -= lr * |w| / |u| * u, where the ratio is 1 if either norm is 0, and in groups with adapt=False.

    params: as torch's optimisers take them; a group may have lr, betas, eps, weight_decay and adapt of its own.
    UserError: values out of range; sharded parameters (FSDP2), whose norms would be those of one shard.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adapt: bool = True,
    ) -> None:
        if lr < 0:
            raise UserError(f"lr must be 0 or more, got {lr}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise UserError(f"betas must be two numbers from 0 to below 1, got {tuple(betas)}")
        if eps <= 0:
            raise UserError(f"eps must be positive, got {eps}")
        if weight_decay < 0:
            raise UserError(f"weight_decay must be 0 or more, got {weight_decay}")
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "adapt": adapt}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run closure, if any, then update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for some in _bundles(parameters):
                self._update(some, group)
        return loss

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """One step of parameters of one device and dtype, at one count of steps."""
        states = [self._state_of(parameter) for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        means, squares = ([state[name] for state in states] for name in ("mean", "square"))
        for state in states:
            state["step"] += 1
        first, second = group["betas"]
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        step = states[0]["step"]
        scale = torch._foreach_sqrt(squares)
        torch._foreach_div_(scale, math.sqrt(1 - second**step))
        torch._foreach_add_(scale, group["eps"])
        torch._foreach_mul_(scale, 1 - first**step)
        updates = torch._foreach_div(means, scale)
        if group["weight_decay"]:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        if group["adapt"]:
            torch._foreach_mul_(updates, _ratios(parameters, updates))
        torch._foreach_add_(parameters, updates, alpha=-float(group["lr"]))

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            if hasattr(parameter, "full_tensor"):
                raise UserError("lamb cannot train sharded weights (strategy fsdp). Possible: ddp, or adamw.")
            state["step"] = 0
            state["mean"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["square"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def lamb(
    model: nn.Module,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
) -> Lamb:
    """LAMB over the model's parameters, biases and norm weights without decay and without adaptation.

    The defaults are those of the MLPerf BERT reference, as FlagPerf's configurations of it give them (betas 0.9 and
    0.999, weight decay 0.01) and You et al. 2020 (eps 1e-6); its learning rate depends on the batch size. Clip the
    gradients' global norm at 1 before each step, as the reference does. Raises UserError for values out of range.
    """
    groups = parameter_groups(model, weight_decay)
    for group in groups:
        group["adapt"] = all(parameter.dim() >= 2 for parameter in group["params"])
    return Lamb(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def _ratios(parameters: Sequence[Tensor], updates: Sequence[Tensor]) -> list[Tensor]:
    """|w| / |u| of each pair, 1 where either is 0: scalars on the device."""
    weight, update = (torch.stack(torch._foreach_norm(list(tensors))) for tensors in (parameters, updates))
    return list(torch.where((weight > 0) & (update > 0), weight / update, 1.0).unbind())


def _bundles(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters of one device and dtype together, AT_ONCE elements at most, or one that is larger."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        by_kind.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    for alike in by_kind.values():
        bundle: list[Tensor] = []
        size = 0
        for parameter in alike:
            if bundle and size + parameter.numel() > AT_ONCE:
                yield bundle
                bundle, size = [], 0
            bundle.append(parameter)
            size += parameter.numel()
        yield bundle
