"""flash-linear-attention's kernels (package fla-core), which take packed documents as
one row with cu_seqlens.

Written after fla-core 0.6.0 and tested with functions of its signatures; no GPU has run it yet.
"""

from functools import cache
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from .rows import Rows

# Triton gives wrong gradients on Hopper from 3.4 to 3.7.0 (fla issue 640), which fla refuses
# in the first backward.
WRONG_FROM, RIGHT_FROM = (3, 4, 0), (3, 7, 1)
GATED = ("delta rule", "decayed sum")  # the operators that it concerns
OPERATORS = (*GATED, "delta rule by channels", "convolution")
NO_KERNEL = "fla-core has no kernel of it"


def serves(operator: str, x: Tensor) -> str | None:
    """Return None if fla's kernels can run an operator on tensors like x, else the
    reason why they cannot."""
    if x.device.type != "cuda" or x.dtype not in (torch.bfloat16, torch.float16):
        return f"a tensor of {x.dtype} on {x.device.type}: expected bfloat16 or float16 on cuda"
    return unavailable(operator, x.device)


@cache
def unavailable(operator: str, device: torch.device) -> str | None:
    """Return None if the installed versions can run an operator forward and backward on
    a GPU, else the reason."""
    if operator not in OPERATORS:
        return NO_KERNEL
    try:
        found, triton = (metadata.version(name) for name in ("fla-core", "triton"))
    except metadata.PackageNotFoundError as error:
        return f"{error.name} is not installed"
    if _numbers(found) < (0, 6):
        return f"fla-core is {found}: expected 0.6 or later"
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    if operator in GATED and hopper and WRONG_FROM <= _numbers(triton) < RIGHT_FROM:
        return (
            f"fla-core refuses Triton {triton} on Hopper in the backward: expected 3.7.1 or later"
        )
    return None


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, silu: bool
) -> Tensor:
    """Compute convolution.short_convolution by fla's kernel."""
    from fla.modules.causal_conv1d import causal_conv1d

    given = _one_row(x.mT), weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    out, _ = causal_conv1d(*given, activation="silu" if silu else None, cu_seqlens=rows.bounds)
    return out.view(x.mT.shape).mT


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    rows: Rows,
    normalize: bool,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute delta_rule.gated_delta_rule by fla's kernel, with the documents' states as in
    chunked.recur."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    run = chunk_gated_delta_rule if g.dim() == 3 else chunk_kda
    given = map(_one_row, (q, k, v, g.float(), beta))
    named = {"use_qk_l2norm_in_kernel": normalize, **_states(initial), "cu_seqlens": rows.bounds}
    out, final = run(*given, **named)
    return out.view(v.shape), final


def decayed_sum(
    v: Tensor, g: Tensor, k: Tensor, q: Tensor, rows: Rows, initial: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Compute linear_recurrence.decayed_sum by fla's kernel, with the documents' states as in
    chunked.recur."""
    from fla.ops.simple_gla import chunk_simple_gla

    k, q = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (k, q))  # it has no groups
    given = map(_one_row, (q, k, v.to(k.dtype), g.float()))
    named = {"scale": 1.0, **_states(initial), "cu_seqlens": rows.bounds}
    out, final = chunk_simple_gla(*given, **named)
    return out.view(v.shape), final


def _states(initial: Tensor | None) -> dict[str, Any]:
    return {"initial_state": initial, "output_final_state": initial is not None}


def _one_row(x: Tensor) -> Tensor:
    return x.flatten(0, 1)[None].contiguous()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
