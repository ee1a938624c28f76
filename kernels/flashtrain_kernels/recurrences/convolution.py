"""Short depthwise causal convolutions, before a recurrence (Gu and Dao 2023,
"Mamba") or alone (LFM2).

Shapes: B batch, S sequence, D channels, W width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from . import fla
from .rows import Rows, in_full_precision
from .shared_rows import SharedRows


@torch.compiler.disable  # rows would be inputs of the graph, guarded by their values
def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, *, silu: bool = False
) -> Tensor:
    """Return bias + sum_j weight[W - 1 - j] x[t - j] within each document, (B, D, S) in x's dtype.

    Args:
        x: (B, D, S).
        weight, bias: (D, W), of any width, and (D,) or None.
        rows: The documents.
        silu: Whether SiLU follows.
    """
    run = fla.short_convolution if fla.serves("convolution", x) is None else _shifted
    if not isinstance(rows, SharedRows):
        return run(x, weight, bias, rows, silu)
    longer, within, own = rows.with_halos(x, weight.shape[1] - 1)
    out = run(longer, weight, bias, within, silu)[0, :, own].unflatten(1, (x.shape[0], x.shape[2]))
    return out.transpose(0, 1).contiguous()


@in_full_precision
def _shifted(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, silu: bool) -> Tensor:
    flat, width = x.transpose(0, 1).flatten(1), weight.shape[1]
    out = flat * weight[:, -1:]
    for back in range(1, width):
        # where, not a product with 0: another document's NaN must not pass.
        before = torch.where(rows.since >= back, F.pad(flat, (back, 0))[:, : flat.shape[1]], 0)
        out = out + before * weight[:, width - 1 - back, None]
    out = out if bias is None else out + bias[:, None]
    out = (F.silu(out) if silu else out).unflatten(1, (x.shape[0], x.shape[2]))
    return out.transpose(0, 1).contiguous()
