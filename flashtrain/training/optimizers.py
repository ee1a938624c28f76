"""AdamW as GPT-style models use it (weight decay on the matrices only, the fused implementation where there is one),
and Muon for the matrices inside the model with AdamW for the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flashtrain.errors import UserError
from flashtrain.training.one_optimizer import SharedState

# Devices whose AdamW has a fused implementation in every torch that flashtrain supports.
FUSED_DEVICES = ("cuda", "cpu")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimiser groups of the model's trainable parameters: matrices that decay, and the rest that does not.

    The rule is GPT-2's, as nanoGPT and llm.c apply it: a parameter with two or more dimensions (linear weights and
    both embedding tables) decays; biases and norm weights do not. A tied parameter counts once. An empty group is
    left out. Raises UserError for a negative weight decay or a model with nothing to train.
    """
    if weight_decay < 0:
        raise UserError(f"weight_decay must be 0 or more, got {weight_decay}")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UserError(f"{type(model).__name__} has no parameter that is trained (requires_grad is False everywhere)")
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(
    model: nn.Module,
    lr: float = 6e-4,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    fused: bool | str = "auto",
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) over `parameter_groups(model, weight_decay)`.

    fused: "auto" takes the fused implementation where all parameters lie on a device that has it. Repeated runs are
    bitwise equal with either choice; fused and unfused differ from each other in the last bits. Clip gradients with
    `flashtrain.training.gradients`: Lightning's own clipping refuses a fused optimiser under mixed precision.
    Raises UserError for values out of range.
    """
    if lr < 0:
        raise UserError(f"lr must be 0 or more, got {lr}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"betas must be two numbers from 0 to below 1, got {tuple(betas)}")
    if eps <= 0:
        raise UserError(f"eps must be positive, got {eps}")
    if isinstance(fused, str) and fused != "auto":
        raise UserError(f"fused must be true, false or auto, got '{fused}'")
    groups = parameter_groups(model, weight_decay)
    if fused == "auto":
        fused = all(p.device.type in FUSED_DEVICES for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=lr, betas=(betas[0], betas[1]), eps=eps, fused=bool(fused))


def inner_matrices(model: nn.Module) -> list[torch.Tensor]:
    """The weights of linear layers that are trained, without embeddings, tied to them or not, and the output head."""
    head = getattr(model, "output_weight", None)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    return [w for w in weights if w.requires_grad and id(w) not in embeddings and w is not head]


def muon(
    model: nn.Module,
    lr: float = 6e-4,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    fused: bool | str = "auto",
) -> SharedState:
    """Muon (Jordan et al. 2024, torch.optim.Muon) for the matrices inside the model, AdamW for all else.

    lr serves both: Muon's updates are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982).
    momentum is Muon's; the other arguments are as in `adamw`. Raises UserError for values out of range, and for a model
    without such matrices.
    """
    if not 0 <= momentum < 1:
        raise UserError(f"momentum must be a number from 0 to below 1, got {momentum}")
    matrices = inner_matrices(model)
    if not matrices:
        raise UserError(f"{type(model).__name__} has no linear layers inside for muon to train; use adamw")
    rest = adamw(model, lr, betas, eps, weight_decay, fused)
    chosen = {id(matrix) for matrix in matrices}
    for group in rest.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in chosen]
    rest.param_groups = [group for group in rest.param_groups if group["params"]]
    first = torch.optim.Muon(
        matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
    )
    return SharedState([first, rest])
