"""Float32 master copies of half-precision weights, for any optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtrain.training.one_pass_adamw import HALF, OnePassAdamW
from flashtrain.training.optimizers import SharedState, bundles

GRADIENT_CHUNK = 2**28  # elements of the gradients that a step holds in float32: 1 GiB


class MasterWeights(SharedState):
    """An optimizer that updates float32 master copies of half-precision
    parameters, then rounds them.

    Updates that are too small for bfloat16's 8 bits of precision thus add up (Micikevicius et al.
    2018, "Mixed Precision Training", section 3.1). The saved state is the inner optimizer's, with
    the copies under "masters".

    Args:
        inner: an optimizer that has not stepped yet; its parameters are replaced by the copies.
        host: whether the copies of all parameters and the optimizer's states lie in host memory,
            where the step is computed (Ren et al. 2021, "ZeRO-Offload"). Each step moves all
            gradients to the host and all parameters back.
    """

    def __init__(self, inner: torch.optim.Optimizer, host: bool = False) -> None:
        self.host = host
        self._saved: dict[str, Any] | None = None  # a state to load before the next step
        self.pairs: list[tuple[Tensor, Tensor]] = []
        for group in inner.param_groups:
            group["params"] = [self._master_of(parameter) for parameter in group["params"]]
        super().__init__([inner])
        self._one_pass = inner if isinstance(inner, OnePassAdamW) and not host else None
        if self._one_pass is not None:
            self._one_pass.weights = {master: parameter for parameter, master in self.pairs}
            self.scale_gradients = self._one_pass.scale_gradients  # for clip_gradients

    def _master_of(self, parameter: Tensor) -> Tensor:
        if parameter.dtype not in HALF and not self.host:
            return parameter
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        master = (
            parameter.detach()
            .to("cpu" if self.host else parameter.device, dtype, copy=True)
            .requires_grad_()
        )
        self.pairs.append((parameter, master))
        return master

    def _update(self) -> None:
        """Step the copies, and round them into the parameters. A parameter whose .grad is None does
        not change."""
        self._load_saved()
        if self._one_pass is not None and self._one_pass.step_in_one_pass():
            return
        # Parameters without a copy have their gradient here: the first of the
        # steps below trains them.
        others = [
            (one, one.grad)
            for group in self.param_groups
            for one in group["params"]
            if one.grad is not None
        ]
        copies = {id(parameter): master for parameter, master in self.pairs}
        moved = [parameter for parameter, _ in self.pairs if parameter.grad is not None]
        # One bundle at a time, so that not all gradients exist in float32 at once. A step skips
        # what has no gradient.
        for parameters in list(bundles(moved, GRADIENT_CHUNK)) or [[]]:
            masters = [copies[id(parameter)] for parameter in parameters]
            for parameter, master in zip(parameters, masters, strict=True):
                master.grad = parameter.grad.to(master)  # type: ignore[union-attr]
            super()._update()
            if parameters:
                torch._foreach_copy_(parameters, masters)
            for one in [*masters, *(one for one, _ in others)]:
                one.grad = None
        for one, gradient in others:
            one.grad = gradient

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' gradients; the copies have gradients only within a step."""
        super().zero_grad(set_to_none)
        for parameter, _ in self.pairs:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, and the copies under "masters"."""
        self._load_saved()
        return {**super().state_dict(), "masters": [master.detach() for _, master in self.pairs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state. If it has no "masters", the copies take the values
        of the current weights."""
        masters = state_dict.get("masters", [parameter for parameter, _ in self.pairs])
        self._saved = {name: value for name, value in state_dict.items() if name != "masters"}
        if not self.host:  # a loaded state would be moved to the parameters' device by Lightning
            self._load_saved()
        with torch.no_grad():
            for (parameter, master), saved in zip(self.pairs, masters, strict=True):
                master.copy_(saved)
                parameter.copy_(master)

    def _load_saved(self) -> None:
        saved, self._saved = self._saved, None
        if saved is not None:
            super().load_state_dict(saved)
