"""Recurrences and convolutions of transformers' hybrids on packed rows: no document sees another.

transformers masks packed documents in attention alone. Its hybrids call their other functions by
name in their module, where these are replaced by ones that know the rows of the running forward
(RUNNING); other calls get the original.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flashtrain.announce import say
from flashtrain_kernels import recurrences
from flashtrain_kernels.recurrences import Rows, fla

# Layers whose weights mixers read without calling them.
READ_WEIGHTS = ("conv", "conv1d", "dt_proj")

INSTALL = "Install the extra flashtrain[linear] with the versions of constraints-linear.txt"
# The rows of the forward that runs in this thread; None outside of one.
RUNNING: ContextVar[Rows | None] = ContextVar("rows", default=None)


@contextmanager
def using(rows: Any, variable: ContextVar[Any] = RUNNING) -> Iterator[None]:
    """Within this context, served mixers compute within the documents of `rows`; a recomputation
    needs it again, since autograd runs it in a thread of its own."""
    token = variable.set(rows)
    try:
        yield
    finally:
        variable.reset(token)


def served(kind: type) -> bool:
    """Return whether a transformers class is of FAMILIES: hybrids whose recurrences this file
    computes within packed documents."""
    others, _, own = kind.__module__.partition("transformers.models.")
    return not others and own.partition(".")[0] in FAMILIES


def serve_mixers(kind: type) -> bool:
    """Make the recurrences and convolutions of a served hybrid's class compute within documents.
    Return whether kernels of this machine's GPU run any; a line says which others are slow."""
    module, gpu = sys.modules[kind.__module__], torch.cuda.is_available()
    slow, fast = defaultdict[str, list[str]](list), False
    for name, (of_rows, operator) in FUNCTIONS.items():
        owner_name, _, attribute = name.rpartition(".")
        owner = getattr(module, owner_name, None) if owner_name else module
        original = getattr(owner, attribute, None)
        if original is None:
            continue
        on_gpu = gpu and operator is not None
        reason = fla.unavailable(operator, torch.device("cuda")) if on_gpu else None
        fast = fast or (on_gpu and reason is None)
        if not hasattr(original, "of_rows"):
            # Transformers would call fla itself, on CPUs too, and what it refuses in the backward.
            always = operator in fla.OPERATORS and find_spec("fla") is not None
            setattr(owner, attribute, _within_documents(original, of_rows, always))
            if reason is not None:
                slow[reason].append(str(operator))
    if slow:
        parts = [f"{', '.join(names)} ({reason})" for reason, names in slow.items()]
        line = f"{kind.__name__}: in plain torch, which is slow: {'; '.join(parts)}"
        say(line if slow.keys() == {fla.NO_KERNEL} else f"{line}. {INSTALL}")
    return fast


def _within_documents(
    original: Callable[..., Any], of_rows: Callable[..., Any], always: bool
) -> Callable[..., Any]:
    """Return a function that calls of_rows(rows, *arguments) in a forward with packed rows, or
    with any if `always`, and `original` elsewhere."""

    @torch.compiler.disable  # rows would become inputs of the graph, and be guarded by their values
    @wraps(original)
    def dispatched(*args: Any, **named: Any) -> Any:
        rows = RUNNING.get()
        if rows is None or not (rows.packed or always or of_rows is _unfused):
            return original(*args, **named)
        return of_rows(rows, *args, **named)

    dispatched.of_rows, dispatched.original = of_rows, original
    return dispatched


def _convolution(
    rows: Rows, x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **_: Any
) -> Tensor:
    silu = {None: False, "silu": True, "swish": True}[activation]  # others are in no model
    return recurrences.short_convolution(x, weight, bias, rows, silu=silu)


def _delta_rule(
    rows: Rows, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **given: Any
) -> Any:
    normalize = given["use_qk_l2norm_in_kernel"]
    # No final state.
    return recurrences.gated_delta_rule(q, k, v, g, beta, rows, normalize=normalize), None


def _state_space(
    rows: Rows, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **given: Any
) -> Tensor:
    dt = F.softplus(dt + given["dt_bias"]).clamp(*given["dt_limit"])
    return recurrences.state_space(x, dt, A, B, C, rows, given["D"])


def _selective_scan(
    rows: Rows, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **given: Any
) -> Tensor:
    dt = F.softplus(dt + given["delta_bias"][:, None])
    return recurrences.selective_scan(x, dt, A, B, C, rows, given["D"]) * F.silu(given["z"])


def _lightning(
    rows: Rows, layer: Any, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Compute MiniMaxLightningAttention.forward within documents; it calls no function that could
    be replaced instead."""
    qkv = layer.act_fn(layer.qkv_proj(hidden_states)).unflatten(2, (layer.num_attention_heads, -1))
    q, k, v = qkv.split(layer.head_dim, 3)
    out = recurrences.decayed_sum(v, -layer.slope_rate.flatten().expand(v.shape[:3]), k, q, rows)
    return layer.out_proj(
        layer.output_gate(hidden_states).sigmoid() * layer.norm(out.flatten(2))
    ), None


def _projection(rows: Rows, layer: Any, hidden_states: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """Compute ZayaCCAProjection.forward, which convolves queries and keys and reads the values of
    the token before, one document at a time."""
    documents = hidden_states.flatten(0, 1)[None].split(rows.bounds.diff().tolist(), 1)
    found = zip(*(type(layer).forward.original(layer, one, None) for one in documents), strict=True)
    return tuple(torch.cat(parts, 1)[0].unflatten(0, hidden_states.shape[:2]) for parts in found)


def _mask(rows: Rows, **named: Any) -> Any:
    """Call create_causal_mask with the positions of the rows, which Granite does not pass."""
    from transformers.masking_utils import create_causal_mask

    return create_causal_mask(**{**named, "position_ids": rows.positions})


def _unfused(rows: Rows, *_: Any, **__: Any) -> None:
    """Return None in place of mamba_ssm's fused mixer, so that the layer computes step by step: the
    mixer knows no documents, and reads out_proj.weight without its adapters."""


# By their names in transformers' modules, with the operator that a GPU's kernels may run.
FUNCTIONS: dict[str, tuple[Callable[..., Any], str | None]] = {
    "create_causal_mask": (_mask, None),
    "causal_conv1d_fn": (_convolution, "convolution"),
    "torch_chunk_gated_delta_rule": (_delta_rule, "delta rule"),
    "chunk_kimi_delta_attention": (_delta_rule, "delta rule by channels"),
    "mamba2_chunk_scan": (_state_space, "decayed sum"),
    "mamba_selective_scan": (_selective_scan, "selective scan"),
    "mamba2_split_conv1d_scan_combined": (_unfused, None),
    "mamba_inner_fn": (_unfused, None),
    "MiniMaxLightningAttention.forward": (_lightning, "decayed sum"),
    "ZayaCCAProjection.forward": (_projection, None),
}
# Those that tests/integrations/test_huggingface_mixers.py runs.
FAMILIES = {
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba",
    "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba2", "minimax", "nemotron_h", "olmo_hybrid",
    "qwen3_5", "qwen3_5_moe", "qwen3_next", "zamba2", "zaya",
}  # fmt: skip
