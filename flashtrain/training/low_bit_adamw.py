"""AdamW with both moments in 8 bits, by torchao."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from flashtrain.errors import UserError, needs_package
from flashtrain.training.optimizers import parameter_groups


def adamw_8bit(model: nn.Module, *, weight_decay: float, **options: Any) -> torch.optim.Optimizer:
    """Make torchao's AdamW: moments in 8 bits, one scale per 256 numbers (Dettmers et al.
    2021, arXiv 2110.02861).

    Args:
        model: its trainable parameters are updated.
        weight_decay: weight decay of parameters with two or more dimensions; others have none.
        options: lr, betas and eps, as in `adamw`.

    Raises:
        UserError: torchao is not installed, or devices cannot share a weight's rows evenly.
    """
    with needs_package("optimizer.states=8bit", "torchao", "low-bit"):
        from torchao.optim import AdamW8bit
    for name, one in model.named_parameters():
        if one.requires_grad:
            _check_even(name, one)

    def local(x: torch.Tensor) -> torch.Tensor:
        return x.to_local() if isinstance(x, DTensor) else x

    class Resumable(AdamW8bit):
        """An AdamW8bit that also loads states that are not quantised, as sharded runs save them
        (distributed/sharded_checkpoints.py)."""

        @torch.no_grad()
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            for one, state in self.state.items():
                for name, signed in (("exp_avg", True), ("exp_avg_sq", False)) if state else ():
                    new = self._new_buffer(one, signed)
                    if type(local(new)) is not type(local(state[name])):
                        local(new).copy_(local(state[name]))
                        state[name] = new

    return Resumable(parameter_groups(model, weight_decay), **options)


def _check_even(name: str, parameter: torch.Tensor) -> None:
    """Raise UserError if the devices cannot share the parameter's rows evenly."""
    # torchao 0.18 decides by each rank's own number of rows whether a state is stored in 8 bits,
    # and a checkpoint cannot gather states of two kinds.
    if not isinstance(parameter, DTensor):
        return
    for at, place in enumerate(parameter.placements):
        devices = parameter.device_mesh.size(at)
        if isinstance(place, Shard) and parameter.shape[place.dim] % devices:
            raise UserError(
                f"optimizer.states=8bit needs weights whose rows the {devices} devices share "
                f"evenly, and {name} has {parameter.shape[place.dim]} rows. "
                "Use optimizer.states=full or trainer.strategy=ddp."
            )
