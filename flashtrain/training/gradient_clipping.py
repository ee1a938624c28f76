"""Clip gradients by their norm over all parameters, also for sharded parameters and scaled
losses."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn


@torch.no_grad()
def clip_gradients(
    module: nn.Module,
    max_norm: float | None,
    scale: float | torch.Tensor = 1.0,
    optimizer: Any = None,
) -> torch.Tensor:
    """Scale the gradients so that their Euclidean norm over all parameters is at most max_norm: in
    place, or within the step of an optimizer that can.

    Pascanu et al. 2013, arXiv 1211.5063. If the norm is NaN or infinite, all gradients become NaN,
    so that the fault shows.

    Args:
        module: holds the parameters. If FSDP2 shards them (DTensor), the norm is over all shards,
            and every rank must call this.
        max_norm: the largest norm; None or 0: only measure.
        scale: the factor by which fp16 loss scaling has multiplied the gradients; it is not divided
            out.
        optimizer: whose step follows. If it has `scale_gradients` (OnePassAdamW, MasterWeights) and
            accepts the factor, the gradients stay as they are until then.

    Returns:
        The norm before clipping, divided by `scale`: a float32 scalar on the gradients'
        device, not read by the host.
    """
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    if any(one.is_cuda and one.element_size() < 4 for one in gradients):  # else a norm of 16 bits
        gradients = list(torch._foreach_norm(gradients, 2.0, dtype=torch.float32))
    norm = torch.nn.utils.get_total_norm(gradients)
    full_tensor = getattr(norm, "full_tensor", None)
    if full_tensor is not None:  # a DTensor: sums over the shards
        norm = full_tensor()
    norm = norm.float() / scale
    if max_norm:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch computes it
        scale_later = getattr(optimizer, "scale_gradients", None)
        if scale_later is None or not scale_later(factor):
            torch.nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, norm)
    return norm


def gradient_scale(trainer: pl.Trainer, optimizer: Any) -> float | torch.Tensor:
    """Return the factor by which gradients are still multiplied when Lightning clips them.

    It is 1 except under fp16 loss scaling ("16-mixed") with a fused optimizer, which undoes the
    scaling inside its step; for every other optimizer Lightning undoes it before clipping.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    inner = getattr(optimizer, "optimizer", optimizer)
    if scaler is None or not getattr(inner, "_step_supports_amp_scaling", False):
        return 1.0
    # The device-side value; get_scale() would wait for the device.
    scale = getattr(scaler, "_scale", None)
    return scale if scale is not None else scaler.get_scale()
