"""One optimiser step of any model: zero the gradients, forward, backward, clip, update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

LossFunction = Callable[..., Tensor]
Batches = Callable[[Tensor, Tensor], Sequence[tuple[Any, ...]]]


class TrainingStep:
    """A model on a device, with its optimiser. Called with tokens and labels (B, S), it makes a step.

    loss: of (tokens, labels), a scalar. batches: of the tokens and labels that it is called with, what the loss takes
    in each of several steps, one after the other, where a call is to make more than one (None: one). clip: bounds the
    gradients before the update. autocast: the dtype that matrix products are computed in, None for the weights' own.
    within: entered around the step. schedule: stepped after it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        optimizer: torch.optim.Optimizer,
        clip: Callable[[], object],
        *,
        autocast: torch.dtype | None = None,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
        batches: Batches | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._loss, self._clip, self._within, self._schedule = loss, clip, within, schedule
        self._autocast, self._batches = autocast, batches
        self._device_type = next(model.parameters()).device.type

    def __call__(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The loss before the (last) update, a scalar on the device that nothing has waited for."""
        each = [(tokens, labels)] if self._batches is None else self._batches(tokens, labels)
        return [self._step(*arguments) for arguments in each][-1]

    def _step(self, *arguments: Any) -> Tensor:
        with self._within():
            self.drop_gradients()
            # as Lightning's precision plugin calls it: weights are cast at each use, or by the compiled graph
            with torch.autocast(
                self._device_type, self._autocast, enabled=self._autocast is not None, cache_enabled=False
            ):
                loss = self._loss(*arguments)
            loss.backward()
            self._clip()
            self.optimizer.step()
            if self._schedule is not None:
                self._schedule.step()
        return loss.detach()

    def drop_gradients(self) -> None:
        """Give the gradients' memory back."""
        self.optimizer.zero_grad(set_to_none=True)

    def move(self, device: torch.device) -> None:
        """Take weights and optimiser states to a device, each parameter staying the object it is."""
        self.drop_gradients()
        updated = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for tensor in {id(one): one for one in (*self.model.parameters(), *self.model.buffers(), *updated)}.values():
            tensor.data = tensor.data.to(device)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device)
