"""What runs a call, and why, in one line: `flashtrain_kernels.explain`.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

import torch
from torch import Tensor

from . import compute, dispatch, fast_path
from .dispatch import Tiles
from .masks import BlockMask
from .options import Options


def explained(q: Tensor, k: Tensor, v: Tensor, options: Options, features: str) -> str:
    """The line for q (B, Sq, H, D), k and v (B, Sk, K, D). features: what the call asks for, in words."""
    implementation = dispatch.implementation_for(q.device.type)
    call = f"{features}, head dimension {q.shape[3]}, {str(q.dtype).removeprefix('torch.')}"
    forced = "forced" if dispatch.forced_implementation() is not None else None
    if implementation == "torch":
        why = forced or f"tensors are on {q.device.type}, our kernels need CUDA"
        return (
            "torch scaled_dot_product_attention, for a log-sum-exp, softcap or dropout the reference in plain PyTorch: "
            f"{why}; {call}"
        )
    if implementation == "reference" or not dispatch.runs_kernels(q.device):
        return f"reference in plain PyTorch: {forced}; {call}"
    kind = compute.kind_of(q, k, options)
    block_size = options.mask.block_size if isinstance(options.mask, BlockMask) else None
    tiles = dispatch.tiles_for(q.device, q.shape[3], q.dtype, kind, block_size=block_size)
    special = "".join(f", {name}" for name, applies in kind._asdict().items() if applies)
    reasons = fast_path.forward_refusal(q, k, v, options), fast_path.backward_refusal(q, k, v, options)
    if None not in reasons:
        why = f"{forced or _where(q.device)}{special}"
        if fast_path.unavailable(q.device) is None:
            why += f"; not the Hopper kernels: {reasons[0]}"
        return f"portable Triton kernels: {why}; {call}; forward {tiles.forward}; {_portable_backward(tiles)}"
    from .backends.hopper import backward as hopper_backward
    from .backends.hopper import forward_tiles, planning

    forward = (
        str(forward_tiles.forward_tile(q, k, options))
        if reasons[0] is None
        else f"portable, {tiles.forward} ({reasons[0]})"
    )
    own = f"{planning.BACKWARD[0]} queries x {planning.BACKWARD[1]} keys"
    if hopper_backward.has_whole_heads(q, k, options):
        own += ", whole heads in a program"
    backward = own if reasons[1] is None else f"portable, {_portable_backward(tiles)} ({reasons[1]})"
    return f"Hopper kernels: {forced or _where(q.device)}{special}; {call}; forward {forward}; backward {backward}"


def _where(device: torch.device) -> str:
    if device.type != "cuda":
        return "TRITON_INTERPRET=1 on CPU tensors"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor} (table row {dispatch.architecture((major, minor))})"


def _portable_backward(tiles: Tiles) -> str:
    return f"dK/dV {tiles.dkdv}; dQ {tiles.dq}{' in one launch' if tiles.together else ''}"
