"""What mode=plan says of any run: how long so many FLOPs take here."""

from __future__ import annotations

import time

import torch

from flashtrain.training.hardware import Hardware

# The part of the device's rate that a compiled training step reaches: on an H200 about 0.4 of the dense peak for
# GPT-2 124M (recipes/results/gpt2-h200.json); on a CPU, half of what one large matrix product does is a careful guess.
GPU_EFFICIENCY = 0.4
CPU_EFFICIENCY = 0.5
VOCABULARY = {"bytes": 257, "gpt2": 50257}


def expected_rate(hardware: Hardware) -> tuple[float, str]:
    """FLOP/s that a training step may be expected to reach on one device, and where the figure comes from."""
    if hardware.peak_flops is not None:
        return GPU_EFFICIENCY * hardware.peak_flops, f"at {GPU_EFFICIENCY:.0%} of the device's peak"
    device, dtype = hardware.kind, torch.float32 if hardware.kind == "cpu" else torch.float16
    size = 1024 if hardware.kind == "cpu" else 8192
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    float((matrix @ matrix)[0, 0])
    began, repeats = time.perf_counter(), 3
    for _ in range(repeats):
        float((matrix @ matrix)[0, 0])  # reading a number waits for the device
    rate = repeats * 2 * size**3 / (time.perf_counter() - began)
    return CPU_EFFICIENCY * rate, f"at {CPU_EFFICIENCY:.0%} of a matrix product's rate measured now"


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
