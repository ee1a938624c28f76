"""The Hopper backend: which calls its kernels serve, and how a call is run.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

import logging
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import environment
from ...environment import constant
from ...masks import AnyMask, BlockMask, Mask, Sequences
from ...options import Options
from .. import Call, Direction, Gradients
from ..portable import tile_table

NAME, TITLE = "hopper", "Hopper kernels"
# Releases of Triton for whose Gluon the kernels were written: it is experimental and changes
# (triton_compat.py). They were measured on a GPU with 3.6; with the others they were compiled, to
# code that hardly spills in its loops.
RELEASES = ((3, 6), (3, 7), (3, 8), (3, 9))
_LOGGER = logging.getLogger(__name__)


def unavailable(device: torch.device) -> str | None:
    """Return None if calls on this device can run on the Hopper kernels, else
    the reason why none can."""
    if device.type != "cuda":
        return f"tensors are on {device.type}"
    if environment.forced_implementation() not in (None, NAME):
        return f"{environment.forced_implementation()} is forced"
    return _unavailable(device.index if device.index is not None else torch.cuda.current_device())


@cache
def _unavailable(index: int) -> str | None:
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) != (9, 0):
        return f"the GPU is sm_{major}{minor}, the Hopper kernels need sm_90"
    release = environment.release()
    if release in RELEASES:
        return None
    oldest, newest, installed = (
        ".".join(map(str, numbers)) for numbers in (RELEASES[0], RELEASES[-1], release)
    )
    reason = f"the Hopper kernels need Triton {oldest} to {newest}, installed is {installed}"
    _LOGGER.warning(
        "flashtrain_kernels runs its portable kernels on this Hopper GPU, in long calls at some "
        "0.6 to 0.75 times the speed of the Hopper kernels: %s",
        reason,
    )
    return reason


def serves(call: Call, direction: Direction) -> str | None:
    """Return None if this call can run on the Hopper kernels in this direction, else
    the reason why it cannot."""
    reason = unavailable(call.q.device) or _why_not_wide(call.q.shape[3], call.options.mask)
    if reason is not None:
        return reason
    value_dim = call.v.shape[3]
    if value_dim != call.q.shape[3] and (value_dim < 64 or value_dim % 8):
        return "narrower values only with head dimensions that are multiples of 8 from 64"
    if direction == "forward" and value_dim != call.q.shape[3] and call.options.mask is not None:
        return "narrower values only without masks: no GPU has run them"
    if direction == "forward":
        return _serves_forward(*call)
    from .backward import has_whole_heads, is_deterministic, serves_backward, why_not_deterministic

    q, k, v, options = call
    if not has_whole_heads(q, k, options):
        reason = why_not_deterministic(q, options) if is_deterministic(options) else None
        if reason is not None:
            return reason
        if environment.forced_implementation() is None and _is_faster_portable(q, k, options):
            return "the portable kernels are faster"
    return serves_backward(q, k, v, options)


def _why_not_wide(head_dim: int, mask: AnyMask | None) -> str | None:
    """Return None if the kernels for wide heads serve this mask, or the heads are not wide, else
    the reason why not."""
    if head_dim <= 128:
        return None
    if isinstance(mask, BlockMask):
        return "block masks only with head dimensions up to 128"
    # They compile, and spill registers; no GPU has run them.
    if isinstance(mask, Mask) and mask.queries.shape[0] > 5:
        return "masks with two intervals a query only with head dimensions up to 128"
    if isinstance(mask, Mask) and mask.keys is not None and environment.release() >= (3, 8):
        return "key positions only with head dimensions up to 128, or Triton up to 3.7"
    return None


def _serves_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """None if the Gluon forward serves this call, else the reason. q (B, Sq, H,
    D), k, v (B, Sk, K, D)."""
    from .descriptors import why_not  # Gluon is imported only where it runs
    from .dropout_rng import why_not_change

    if q.shape[3] > 256 or q.shape[3] % 8:
        return "the head dimension must be a multiple of 8, at most 256"
    if not options.scale > 0:
        return "the scale must be positive"
    reason = why_not_change(q, k, options)
    if reason is not None:
        return reason
    if isinstance(options.mask, Sequences) and q.shape[0] != 1:
        return "packed sequences in a batch of more than one row"
    if isinstance(options.mask, BlockMask) and min(options.mask.block_size) < 64:
        return "block masks only with blocks of at least 64 queries and keys"
    if not (q.numel() and k.numel()):
        return "nothing to compute"
    if max(q.shape[1], k.shape[1]) >= 1 << 30 or q.shape[0] * q.shape[2] * q.shape[1] >= 1 << 31:
        return "Sq, Sk or B H Sq is too large for 32-bit indices"
    return why_not("q", q) or why_not("k", k) or why_not("v", v)


def _is_faster_portable(q: Tensor, k: Tensor, options: Options) -> bool:
    """Return whether the portable backward is faster for this call: measured for short causal calls
    at D = 64 without whole heads (backward.has_whole_heads, which the caller has tested)."""
    causal = options.mask is None and options.right is not None and not options.rich
    return causal and q.shape[3] == 64 and max(q.shape[1], k.shape[1]) <= 512


def changes_sequences(options: Options, head_dim: int) -> bool:
    """Return whether the Hopper kernels accept packed sequences with these options: at
    head dimensions 64 and 128, ALiBi alone, or dropout alone if queries and keys have the
    same cu_seqlens tensor."""
    if head_dim != 64 and head_dim != 128:
        return False
    mask = options.mask.sequences if isinstance(options.mask, Mask) else options.mask
    if not isinstance(mask, Sequences) or options.softcap > 0 or options.bias is not None:
        return False
    if options.dropout_p == 0:
        return options.alibi_slopes is not None and options.alibi_slopes.stride(-1) == 1
    return options.alibi_slopes is None and mask.cu_seqlens_q is mask.cu_seqlens_k


def finds_sequences(device: torch.device, head_dim: int, dtype: torch.dtype, changed: bool) -> bool:
    """Return whether the Hopper kernels read packed sequences from cu_seqlens, without a Mask, in
    forward and backward. changed: whether the call has ALiBi, dropout or a bias in a form that
    `changes_sequences` refuses; if so, False."""
    return _both_passes(head_dim) and not changed and _available(device, dtype)


def _both_passes(head_dim: int) -> bool:
    """Return whether the Hopper kernels run the forward and the backward of calls with a mask at
    this head dimension."""
    # Under torch.compile head_dim may be symbolic: comparisons make constants of it.
    return True if head_dim >= 64 and head_dim <= 256 and head_dim % 8 == 0 else False  # noqa: SIM210


@constant
def _available(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype.itemsize == 2 and unavailable(device) is None


def plan_blocks(
    mask: Mask, head_dim: int, dtype: torch.dtype, rich: bool, softcap: bool
) -> tuple[int, ...] | None:
    """Return the tile sizes that a mask's plan must have, or None if these kernels run neither
    direction of its calls. If they run one, the other's sizes are the portable kernels'. Arguments:
    see Backend.plan_blocks."""
    # Under torch.compile head_dim may be symbolic: comparisons make constants of it.
    if rich or head_dim % 8 or head_dim > 256 or _why_not_wide(head_dim, mask) is not None:
        return None
    width = tile_table.width_of(head_dim)
    two = True if mask.queries.shape[0] > 5 else False  # noqa: SIM210 - a constant
    return _plan_blocks(mask.queries.device, width, two, dtype, _both_passes(head_dim))


@constant  # torch.compile may neither look for a GPU nor trace through the tables
def _plan_blocks(
    device: torch.device, width: int, two: bool, dtype: torch.dtype, backward: bool
) -> tuple[int, ...] | None:
    if dtype.itemsize != 2 or unavailable(device) is not None:
        return None
    from .backward import PLANNED as OF_BACKWARD
    from .forward_tiles import PLANNED as OF_FORWARD
    from .forward_tiles import PLANNED_TWO

    portable = tile_table.plan_blocks(device, width, dtype)
    own = OF_BACKWARD[width] if backward else ()
    of_forward = PLANNED_TWO if two else OF_FORWARD[width]
    return (*of_forward, *portable[2 : 6 - len(own)], *own)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Run the forward of a served call; return out (B, Sq, H, D) and lse (B, H, Sq) in float32."""
    from .forward import forward_launches

    call, (out, lse) = _readied(call), call.empty_results()
    if out.numel():
        for launch in forward_launches(call, out, lse):
            launch.run()
    return out, lse


def _readied(call: Call) -> Call:
    return call if isinstance(call.options.mask, Sequences) else call.readied(plan_blocks)


def backward(call: Call, gradients: Gradients) -> None:
    """Run the backward of a served call: write dq, dk and dv. dbias is None, as calls with
    a bias are not served."""
    from .backward import backward_launches
    from .descriptors import why_not

    if 0 in call.q.shape or 0 in call.k.shape:
        for gradient in (gradients.dq, gradients.dk, gradients.dv):
            gradient.zero_()
        return
    value_dim = call.v.shape[3]
    if value_dim < call.q.shape[3]:  # these kernels have values as wide as keys
        missing = (0, call.q.shape[3] - value_dim)
        dout, out, v = (pad(x, missing) for x in (gradients.dout, gradients.out, call.v))
        wide = gradients._replace(dout=dout, out=out, dv=torch.empty_like(v))
        backward(call._replace(v=v), wide)
        gradients.dv.copy_(wide.dv[..., :value_dim])
        return
    dout, out = (
        x if why_not("", x) is None else x.contiguous() for x in (gradients.dout, gradients.out)
    )
    for launch in backward_launches(_readied(call), gradients._replace(dout=dout, out=out)):
        launch.run()


def describe(call: Call, direction: Direction) -> str:
    """Return the tile sizes of a call as text; for the backward also whether a program
    takes all keys of a head."""
    from .backward import QUERIES, has_whole_heads, keys_of_item
    from .forward_tiles import forward_tile

    if direction == "forward":
        return str(forward_tile(call.q, call.k, call.options))
    whole = ", whole heads in a program" if has_whole_heads(call.q, call.k, call.options) else ""
    keys = keys_of_item(tile_table.width_of(call.q.shape[3]))
    return f"{QUERIES} queries x {keys} keys{whole}"
