"""Clipping gradients by their norm: sharded parameters and fused optimisers too, without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from flashtrain.errors import UserError


@torch.no_grad()
def clip_gradients(
    module: nn.Module | Iterable[torch.Tensor],
    max_norm: float | None,
    scale: float | torch.Tensor = 1.0,
) -> torch.Tensor:
    """Scale the gradients in place so that their Euclidean norm over all parameters is at most max_norm.

    module: a module or its parameters, ordinary or sharded by FSDP2 (DTensor; the norm is then that over all shards,
    and every rank must call this). max_norm None, 0 or infinite only measures. scale: what the gradients are multiplied
    by at present (fp16 loss scaling); they stay so multiplied.

    Returns the norm before clipping, unscaled: a float32 scalar on the gradients' device, not read by the host.
    A NaN or infinite norm makes the gradients NaN rather than being hidden. Pascanu et al. 2013, arXiv 1211.5063.
    Raises UserError for a negative max_norm.
    """
    if max_norm is not None and max_norm < 0:
        raise UserError(f"gradient clipping needs a norm of 0 (none) or more, got {max_norm}")
    parameters = list(module.parameters() if isinstance(module, nn.Module) else module)
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    if not parameters:
        return torch.zeros(())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, norm_type=2.0)
    full_tensor = getattr(norm, "full_tensor", None)
    if full_tensor is not None:  # a DTensor: the sum over the shards is still to be made
        norm = full_tensor()
    norm = norm.float() / scale
    if max_norm and max_norm != float("inf"):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def gradient_scale(trainer: pl.Trainer, optimizer: Any) -> float | torch.Tensor:
    """The factor that gradients still carry when Lightning asks for clipping.

    1 except under fp16 loss scaling ("16-mixed") with a fused optimiser, which undoes the scaling itself inside its
    step; Lightning undoes it before clipping for every other optimiser.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    inner = getattr(optimizer, "optimizer", optimizer)
    if scaler is None or not getattr(inner, "_step_supports_amp_scaling", False):
        return 1.0
    # The device-side value; get_scale() would wait for the device.
    scale = getattr(scaler, "_scale", None)
    return scale if scale is not None else scaler.get_scale()


class ClipsGradients(pl.LightningModule):
    """A LightningModule base whose `Trainer(gradient_clip_val=...)` works with fused optimisers and FSDP2.

    Lightning's own clipping raises for a fused optimiser under mixed precision. Logs `gradient_norm` (before clipping)
    at the trainer's log interval.
    """

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if gradient_clip_algorithm not in (None, "norm"):
            raise UserError(f"gradients are clipped by their norm only, not by '{gradient_clip_algorithm}'")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        scale = gradient_scale(self.trainer, optimizer)
        norm = clip_gradients(parameters, gradient_clip_val, scale)
        self.log("gradient_norm", norm, on_step=True, on_epoch=False, batch_size=1)
