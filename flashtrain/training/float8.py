"""Linear layers in float8 (model.float8): which they are, and what they are expected to gain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from flashtrain.errors import UserError, needs_package
from flashtrain.models.mixer import DECAYS

if TYPE_CHECKING:
    from flashtrain.models.trainable import Trainable
    from flashtrain.training.hardware import Hardware

CAPABILITY = (8, 9)  # the first GPUs whose tensor cores multiply float8
RATE = 2  # peak of float8 products over that of bf16's, on every GPU in hardware.PEAK_FLOPS
BF16_GRADIENTS = "rowwise_with_gw_hp"  # the recipe whose weight gradients are products in bf16
EMULATE = False  # set by tests: compute with dequantized numbers, on any device
# Modules that stay in the compute type: adapters, and what sees or chooses a part of the tokens.
NOT_CONVERTED = {"lora_A", "lora_B", "experts", "router", "gate"}
# Time of a layer's casts over that of its products in bf16, times the harmonic mean of its widths;
# from steps of hf-float8-h200.json: 1.13, 1.02 and 1.09 times bf16's speed.
CASTS = {"tensorwise": 780, "rowwise": 1400, BF16_GRADIENTS: 600}
STEP_RATE = 0.7  # a step's FLOP/s over its large products': 0.50 and 0.71 of an H200's peak


def check_float8(recipe: str | None, hardware: Hardware, *, plans: bool) -> None:
    """Raise UserError if this machine cannot train in float8; a plan needs no torchao."""
    if recipe is None:
        return
    if (hardware.capability or (0, 0)) < CAPABILITY and not EMULATE:
        raise UserError(
            f"model.float8={recipe} needs a GPU of sm_89 or later (L40S, RTX 4090, H100, B200), "
            f"and this is {hardware.name}. Set model.float8=null."
        )
    if not hardware.precision.startswith("bf16"):
        raise UserError(
            f"model.float8={recipe} with hardware.precision={hardware.precision}. "
            "Expected bf16-mixed or bf16-true."
        )
    if not plans:
        with needs_package(f"model.float8={recipe}", "torchao", "low-bit"):
            import torchao.float8  # noqa: F401


def pays(linear: nn.Linear, recipe: str) -> bool:
    """Return whether a layer is large enough to gain by float8: the limits of torchao 0.18's
    filters, which it has for two recipes (tensorwise's serve the third)."""
    rows, columns = linear.out_features, linear.in_features
    by_row = rows > 2048 and columns > 1024 and (rows > 4096 or columns > 2048)
    large = by_row if recipe == "rowwise" else rows > 1024 or columns > 4096
    return large and rows % 16 == columns % 16 == 0


def split_linears(model: Trainable, recipe: str) -> tuple[dict[str, nn.Linear], list[str]]:
    """Return the linear layers of a model's blocks that are computed in float8, by name, and the
    names of the others. Raises UserError if none is."""
    inside = {id(one) for block in getattr(model, "blocks", ()) for one in block.modules()}
    named = dict(model.named_modules())
    # Recurrences' kernels read some weights of their mixers without calling the layer.
    mixers = tuple(f"{name}." for name, one in named.items() if DECAYS & one._parameters.keys())
    chosen, others = {}, []
    for name, one in named.items():
        if isinstance(one, nn.Linear) and id(one) in inside:
            called = not name.startswith(mixers) and NOT_CONVERTED.isdisjoint(name.split("."))
            if called and pays(one, recipe):
                chosen[name] = one
            else:
                others.append(name)
    if not chosen:
        raise UserError(
            f"model.float8={recipe}: no linear layer in the blocks of {type(model).__name__} is "
            "large enough to gain by float8. Set model.float8=null."
        )
    return chosen, others


def float8_flops(model: Trainable, recipe: str | None) -> tuple[float, float]:
    """Return one token's FLOPs in float8, forward and backward, and the FLOPs in bf16 that take as
    long as the casts; zeros without float8."""
    if recipe is None:
        return 0.0, 0.0
    rounded = casts = 0.0
    for one in split_linears(model, recipe)[0].values():
        size, trained = one.weight.numel(), one.weight.requires_grad
        rounded += size * (6 if trained and recipe != BF16_GRADIENTS else 4)
        width = 2 / (1 / one.in_features + 1 / one.out_features)
        casts += size * (6 if trained else 4) * CASTS[recipe] / width
    return rounded, casts


def expected_gain(flops: float, rounded: float, casts: float) -> float:
    """Return how many times as fast as in bf16 a compiled step is expected to be, from one token's
    FLOPs and those of float8_flops."""
    return flops / (flops - STEP_RATE * (rounded * (1 - 1 / RATE) - casts))
