"""May a call run on the Hopper kernels (hopper/), and if not, why: asked by compute.py at every call, and by `explain`.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

import logging
from functools import cache

import torch
from torch import Tensor

from . import dispatch, releases
from .masks import Mask
from .options import Options
from .tracing import constant

# Releases of Triton whose Gluon the kernels were written and tested for; the language is experimental and changes.
RELEASES = ((3, 6), (3, 7))
_LOGGER = logging.getLogger(__name__)


def unavailable(device: torch.device) -> str | None:
    """Why no call on this device can run on the Hopper kernels; None where calls can."""
    if device.type != "cuda":
        return f"tensors are on {device.type}"
    if dispatch.forced_implementation() not in (None, "hopper"):
        return f"{dispatch.forced_implementation()} is forced"
    return _unavailable(device.index if device.index is not None else torch.cuda.current_device())


@cache
def _unavailable(index: int) -> str | None:
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) != (9, 0):
        return f"the GPU is sm_{major}{minor}, they are for sm_90"
    if releases.release() not in RELEASES:
        written = " and ".join(".".join(map(str, numbers)) for numbers in RELEASES)
        reason = (
            f"they are written for the Gluon of Triton {written}, installed is {'.'.join(map(str, releases.release()))}"
        )
        _LOGGER.warning("flashtrain_kernels runs its portable kernels on this Hopper GPU: %s", reason)
        return reason
    return None


def plan_blocks(mask: Mask, head_dim: int, dtype: torch.dtype, rich: bool) -> tuple[int, ...]:
    """The tile sizes to plan a mask for: of the Hopper kernels where they will serve the calls, else of the others."""
    # Under torch.compile head_dim may be symbolic: comparisons make constants of it.
    width = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    forward = True if head_dim % 8 == 0 and width <= 128 and mask.keys is None else False  # noqa: SIM210 - a constant
    backward = True if head_dim in (64, 128) else False  # noqa: SIM210
    return _plan_blocks(mask.queries.device, width, dtype, rich, forward, backward)


@constant  # torch.compile may neither look for a GPU nor trace through the tables
def _plan_blocks(
    device: torch.device, width: int, dtype: torch.dtype, rich: bool, forward: bool, backward: bool
) -> tuple[int, ...]:
    portable = dispatch.plan_blocks(device, width, dtype, rich)
    if rich or dtype.itemsize != 2 or unavailable(device) is not None:
        return portable
    from .backends.hopper import planning  # Gluon is imported only where it runs

    own = planning.FORWARD if forward else portable[0:2]
    return (*own, *portable[2:4], *(planning.BACKWARD if backward else portable[4:6]))


def forward_refusal(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why this call's forward does not run on the Hopper kernels; None: it does."""
    reason = unavailable(q.device)
    if reason is not None:
        return reason
    from .backends.hopper.forward_tiles import serves_forward  # Gluon is imported only where it runs

    return serves_forward(q, k, v, options)


def backward_refusal(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """The same of the backward."""
    reason = unavailable(q.device)
    if reason is not None:
        return reason
    from .backends.hopper.backward import has_whole_heads, serves_backward  # Gluon is imported only where it runs

    if not has_whole_heads(q, k, options):
        if options.deterministic or torch.are_deterministic_algorithms_enabled():
            return "deterministic, and their dQ is added up in any order"
        if dispatch.forced_implementation() is None and _is_faster_portable(q, k, options):
            return "the portable kernels are faster"
    return serves_backward(q, k, v, options)


def _is_faster_portable(q: Tensor, k: Tensor, options: Options) -> bool:
    """Measured backward passes in which the portable kernels win where programs have no whole heads: short and causal,
    D = 64; the Hopper path's two small kernels around the main one weigh most there."""
    causal = options.mask is None and options.right is not None
    return causal and q.shape[3] == 64 and max(q.shape[1], k.shape[1]) <= 512
