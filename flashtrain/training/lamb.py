"""LAMB, an optimizer for very large batches (You et al. 2020, arXiv 1904.00962)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.training.optimizers import Stepping, bundles, parameter_groups

# Elements of the parameters that are updated together, with two temporaries of this size.
UPDATE_CHUNK = 2**26


class Lamb(Stepping):
    """LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning", arXiv 1904.00962),
    for very large batches.

    Algorithm 2 of the paper with Adam's bias correction: with Adam's corrected moments m' and v',
    u = m' / (sqrt(v') + eps) + weight_decay * w and w -= lr * |w| / |u| * u, per parameter tensor.
    |w| / |u| is taken as 1 if either norm is 0, and in groups with adapt=False. A step updates many
    tensors per launch and never waits for the device.

    Args:
        params: as torch's optimizers take them; a group may set its own lr, betas, eps,
            weight_decay and adapt.

    Raises:
        UserError: in the first step, if parameters are sharded (FSDP2): their norms would
            be those of one shard.
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
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "adapt": adapt,
        }
        super().__init__(params, defaults)

    def _update(self) -> None:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for some in bundles(parameters, UPDATE_CHUNK):
                self._update_alike(some, group)

    def _update_alike(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update `parameters`, which have the same device, dtype and step count, by one step."""
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
                raise UserError(
                    "lamb cannot train sharded weights. "
                    "Use trainer.strategy=ddp or optimizer=adamw."
                )
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
    """Make LAMB for the model's parameters; biases and norm weights have neither
    weight decay nor adaptation.

    Defaults are those of the MLPerf BERT reference in FlagPerf's configurations (betas 0.9 and
    0.999, weight decay 0.01) and of You et al. 2020 (eps 1e-6). The learning rate depends on the
    batch size. Clip the gradients' global norm at 1 before each step, as the reference does.
    """
    groups = parameter_groups(model, weight_decay)
    for group in groups:
        group["adapt"] = all(parameter.dim() >= 2 for parameter in group["params"])
    return Lamb(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def _ratios(parameters: Sequence[Tensor], updates: Sequence[Tensor]) -> list[Tensor]:
    """Return the trust ratio |w| / |u| of each parameter w and its update u, 1 if either norm is 0,
    as scalars on the device."""
    weight, update = (
        torch.stack(torch._foreach_norm(list(tensors))) for tensors in (parameters, updates)
    )
    return list(torch.where((weight > 0) & (update > 0), weight / update, 1.0).unbind())
