"""A one-line explanation of which implementation and tiles a call gets.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .arguments import autocasted, check_tensors, plain_window, sizes_of
from .attend import Requested, options_of
from .backends import Backend, Call, Direction
from .backends.portable import tile_table
from .checks import dtype_name
from .environment import forced_implementation
from .flash_attn import flash_attn_func
from .forms import BATCH
from .masks import Mask, Sequences
from .options import Options


def explain(q: Tensor, k: Tensor, v: Tensor, *positional: Any, **options: Any) -> str:
    """Return one line on which implementation and tiles `flash_attn_func` uses for
    these arguments, and why.

    Raises:
        TypeError, ValueError: as `flash_attn_func` would.
    """
    given = inspect.signature(flash_attn_func).bind(q, k, v, *positional, **options).arguments
    requested = Requested(
        **{name: value for name, value in given.items() if name not in BATCH.layouts}
    )
    q, k, v = autocasted(q, k, v)
    check_tensors(BATCH, (q, k, v))
    if requested.dropout_seed is None:
        # Explaining draws nothing from torch's generator.
        requested = requested._replace(dropout_seed=0)
    call = Call(q, k, v, options_of(sizes_of(BATCH, (q, k, v)), requested))
    what = (
        f"{_features(requested, call.options)}, head dimension {q.shape[3]}, {dtype_name(q.dtype)}"
    )
    implementation = dispatch.implementation_for(q.device.type)
    forced = "forced" if forced_implementation() is not None else None
    if implementation == "torch":
        why = forced or f"tensors are on {q.device.type}, our kernels need CUDA"
        return (
            "torch scaled_dot_product_attention, for a log-sum-exp, softcap or dropout the "
            f"reference in plain PyTorch: {why}; {what}"
        )
    if implementation == "reference" or not dispatch.runs_kernels(q.device):
        return f"reference in plain PyTorch: {forced}; {what}"
    kind = tile_table.kind_of(call)
    why = (forced or _where(q.device)) + "".join(
        f", {name}" for name, applies in kind._asdict().items() if applies
    )
    passes = dispatch.backend_for(call, "forward"), dispatch.backend_for(call, "backward")
    first = next(backend for backend in dispatch.BACKENDS if backend in passes)
    for other in dispatch.BACKENDS[: dispatch.BACKENDS.index(first)]:
        if other.unavailable(q.device) is None:
            why += f"; not the {other.TITLE}: {other.serves(call, 'forward')}"
    forward, backward = _pass(call, "forward", first), _pass(call, "backward", first)
    backward = backward if first is dispatch.BACKENDS[-1] else f"backward {backward}"
    return f"{first.TITLE}: {why}; {what}; forward {forward}; {backward}"


def _features(requested: Requested, options: Options) -> str:
    """Return the mask and the options of a call in words, such as "causal, ALiBi" or "full
    attention" for none."""
    mask, window = options.mask, plain_window(requested.window_size)
    if isinstance(mask, Mask):
        intervals = "one interval" if mask.queries.shape[0] == 5 else "two intervals"
        order = "" if mask.keys is None else " and keys in an order of their own"
        words = [f"mask with {intervals} a query{order}"]
    elif isinstance(mask, Sequences):
        words = ["packed sequences"]
    elif mask is not None:
        words = [f"block mask of {mask.block_size[0]}x{mask.block_size[1]} blocks"]
    else:
        words = []
    features = {
        "causal": requested.causal,
        f"window {window}": window != (-1, -1),
        "softcap": options.softcap > 0,
        "ALiBi": options.alibi_slopes is not None,
        "bias": options.bias is not None,
        "dropout": options.dropout_p > 0,
        "sinks": requested.learnable_sink is not None,
    }
    return ", ".join(words + [name for name, true in features.items() if true]) or "full attention"


def _pass(call: Call, direction: Direction, first: Backend) -> str:
    """Return the tile sizes of one direction as text, and, if another backend than `first` runs it,
    that backend and why `first` does not."""
    chosen = dispatch.backend_for(call, direction)
    tiles = chosen.describe(call, direction)
    return tiles if chosen is first else f"{chosen.NAME}, {tiles} ({first.serves(call, direction)})"


def _where(device: torch.device) -> str:
    if device.type != "cuda":
        return "TRITON_INTERPRET=1 on CPU tensors"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor} (table row {tile_table.architecture((major, minor))})"
