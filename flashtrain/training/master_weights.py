"""Half-precision weights trained through float32 copies of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtrain.training.one_optimizer import SharedState

HALF = (torch.bfloat16, torch.float16)


class MasterWeights(SharedState):
    """An optimiser of half-precision parameters that keeps, and updates, a float32 copy of each: updates too small for
    bfloat16's 8 bits add up all the same (Micikevicius et al. 2018, "Mixed Precision Training", section 3.1).

    inner: any optimiser that has not stepped yet; it goes on with the copies in the parameters' places. After each step
    the parameters are the copies, rounded. What is saved is `inner`'s state, and the copies under "masters".
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []
        for group in inner.param_groups:
            group["params"] = [self._master_of(parameter) for parameter in group["params"]]
        super().__init__([inner])

    def _master_of(self, parameter: Tensor) -> Tensor:
        if parameter.dtype not in HALF:
            return parameter
        master = parameter.detach().float().requires_grad_()
        self.pairs.append((parameter, master))
        return master

    def _update(self) -> None:
        """A step of the copies. Parameters without a gradient stay as they are."""
        moved = [(parameter, master) for parameter, master in self.pairs if parameter.grad is not None]
        for parameter, master in moved:
            master.grad = parameter.grad.float()  # type: ignore[union-attr]
        super()._update()
        if moved:
            parameters, masters = zip(*moved, strict=True)
            torch._foreach_copy_(list(parameters), list(masters))
        for _, master in moved:
            master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the parameters: the copies have a gradient only within a step."""
        super().zero_grad(set_to_none)
        for parameter, _ in self.pairs:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimiser's state and the copies."""
        return {**super().state_dict(), "masters": [master.detach() for _, master in self.pairs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a saved state; from one without copies the weights as they are."""
        masters = state_dict.get("masters", [parameter for parameter, _ in self.pairs])
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "masters"})
        with torch.no_grad():
            for (parameter, master), saved in zip(self.pairs, masters, strict=True):
                master.copy_(saved)
                parameter.copy_(master)
