"""Make optimizers for a model: AdamW, or Muon with AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.nn.modules.conv import _ConvNd

from flashtrain.training.one_pass_adamw import OnePassAdamW


class Stepping(torch.optim.Optimizer):
    """Base class of optimizers: a step runs torch's optional closure, then `_update`,
    which a subclass defines."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, if any, then update every parameter whose .grad is not None; return the
        closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _update(self) -> None:
        raise NotImplementedError


class SharedState(Stepping):
    """An optimizer made of several inner ones: it has all their parameter groups and one state, and
    its step runs all their steps.

    Schedules and checkpoints see a single optimizer.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([group for one in self.optimizers for group in one.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Make each inner optimizer use the parameter groups and the state of this optimizer."""
        at = 0
        for one in self.optimizers:
            count = len(one.param_groups)
            one.param_groups = self.param_groups[at : at + count]
            one.state = self.state
            at += count
            if isinstance(one, SharedState):
                one._share()

    def _update(self) -> None:
        for one in self.optimizers:
            one.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state, which all inner optimizers then use."""
        super().load_state_dict(state_dict)
        self._share()


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Divide the model's trainable parameters into an optimizer's groups: with
    weight decay, and without.

    The rule is GPT-2's, as in nanoGPT and llm.c: parameters with two or more dimensions (linear
    weights and both embedding tables) decay; norm weights and biases do not, nor does a matrix that
    holds the biases of all experts. A tied parameter is listed once. An empty group is left out.
    """
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": decay} for decay in (weight_decay, 0.0)
    ]
    for name, one in model.named_parameters():
        if one.requires_grad:
            groups[one.dim() < 2 or name.endswith("bias")]["params"].append(one)
    return [group for group in groups if group["params"]]


def adamw(
    model: nn.Module,
    lr: float = 6e-4,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> torch.optim.AdamW:
    """Make AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) for
    `parameter_groups(model, weight_decay)`.

    It is torch's fused implementation (on NVIDIA GPUs our kernel of the same results), which
    Lightning's own clipping rejects under mixed precision. Clip gradients with
    `flashtrain.training.gradient_clipping.clip_gradients`.

    Args:
        model: its trainable parameters are updated.
        lr, betas, eps, weight_decay: as torch.optim.AdamW's; biases and norm weights do not decay.
    """
    return OnePassAdamW(
        parameter_groups(model, weight_decay), lr=lr, betas=betas, eps=eps, fused=True
    )


def inner_matrices(model: nn.Module) -> list[Tensor]:
    """Return the parameters that Muon trains: the trainable matrices inside the model, and stacks
    (N, rows, columns) of its experts' matrices.

    Left out are the output head, embeddings, weights tied to either, and convolutions.
    """
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding | _ConvNd)]
    others = {id(module.weight) for module in outer} | {id(getattr(model, "output_weight", None))}
    inner = [
        (name, one)
        for name, one in model.named_parameters()
        if one.requires_grad and id(one) not in others
    ]
    return [one for name, one in inner if one.dim() in (2, 3) and not name.endswith("bias")]


class Muon(torch.optim.Muon):
    """torch.optim.Muon that also updates stacks of matrices (N, rows, columns), each matrix by
    itself; FSDP2 shards a stack along its first dimension, so that each matrix is whole on one
    device."""

    def _init_group(self, group: Any, *lists: list[Tensor]) -> bool:
        found: tuple[list[Any], ...] = ([], [], [])  # parameters, gradients, momenta
        super()._init_group(group, *found)
        for ready, tensors in zip(lists, found, strict=True):
            for one in tensors:
                if one.dim() == 3:
                    ready.extend(getattr(one, "to_local", lambda one=one: one)().unbind())
                    continue
                # torch 2.13 cannot update a matrix of fewer rows than devices that share them.
                few = hasattr(one, "full_tensor") and len(one) < one.device_mesh.size()
                ready.append(
                    one.redistribute(placements=[Replicate()] * one.device_mesh.ndim)
                    if few
                    else one
                )
                self._gathered += [(one, ready[-1])] if few else []
        return False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run torch's step, and return the closure's result."""
        # Shards, and the wholes that torch's step changes.
        self._gathered: list[tuple[Any, Any]] = []
        loss = super().step(closure)
        for one, whole in self._gathered:
            one.to_local().copy_(whole.redistribute(placements=one.placements).to_local())
        return loss


def muon(
    model: nn.Module,
    lr: float = 6e-4,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
) -> SharedState:
    """Make Muon (Jordan et al. 2024, torch.optim.Muon) for the `inner_matrices`, with AdamW
    for all other parameters.

    Args:
        lr: learning rate of both: Muon's updates are scaled to the size of AdamW's (Liu et al.
            2025, arXiv 2502.16982) by the longer side, so that a matrix may be stored transposed.
        momentum: Muon's momentum. The other arguments are as in `adamw`.
    """
    matrices = inner_matrices(model)
    rest = adamw(model, lr, betas, eps, weight_decay)
    chosen = {id(matrix) for matrix in matrices}
    for group in rest.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in chosen]
    rest.param_groups = [group for group in rest.param_groups if group["params"]]
    flat, stacks = ([one for one in matrices if one.dim() == dimensions] for dimensions in (2, 3))
    first = Muon([{"params": flat}], lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw")
    if stacks:
        first.add_param_group({"params": stacks})  # the constructor refuses them
    return SharedState([first, rest])


def bundles(parameters: Sequence[Tensor], maximum: int) -> Iterator[list[Tensor]]:
    """Yield lists of parameters of one device and dtype: at most `maximum` elements, or a
    single larger parameter."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        by_kind.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    for alike in by_kind.values():
        bundle: list[Tensor] = []
        size = 0
        for parameter in alike:
            if bundle and size + parameter.numel() > maximum:
                yield bundle
                bundle, size = [], 0
            bundle.append(parameter)
            size += parameter.numel()
        yield bundle
