"""Several optimisers as one, for a Trainer that steps, saves and schedules one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class SharedState(torch.optim.Optimizer):
    """The parameter groups of several optimisers, one after the other, with one state: what schedules a group, saves or
    loads it, sees one optimiser. Each steps its own groups."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([group for one in self.optimizers for group in one.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let every optimiser work on this one's groups and state."""
        at = 0
        for one in self.optimizers:
            count = len(one.param_groups)
            one.param_groups = self.param_groups[at : at + count]
            one.state = self.state
            at += count
            if isinstance(one, SharedState):
                one._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run closure, if any, then a step of each."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _update(self) -> None:
        for one in self.optimizers:
            one.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a saved state."""
        super().load_state_dict(state_dict)
        self._share()
